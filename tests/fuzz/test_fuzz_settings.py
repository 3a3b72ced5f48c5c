"""Whatever stands in a site's, a federation's or a scenario's file is read or is a typed error of one line."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mangle import accepted, changed, hypotheses, mangled, survey

from fl_dpgan import config, site_file
from fl_dpgan.errors import ConfigError

SITE = site_file.template("clinic-1", 900).encode()
FEDERATION = b"""name = "hospitals"
address = "server.example:9092"
classes = ["healthy", "ill"]
[model]
num_classes = 2
size = 28
[privacy]
eps_max = 10.0
clipping = { rule = "quantile", c_first = 1.0 }
[privacy.moments.features]
parts = [{ kind = "fourier", count = 4, scales = [60.0] }]
[matching]
rounds = 2
[federation]
sites = 2
quorum = 1
"""
SCENARIO = b"""name = "mine"
method = "other"
seed = 3
[privacy]
batch_size = 8
[data]
source = "digits"
declared_size = [300, 200]
[federation]
sites = 2
[simulation]
eps_max = [1.0, 2.0]
[methods.other.privacy]
clipping = { rule = "fixed", c = 1.0 }
[methods.other.training]
rounds = 3
"""
DEEP = (
    b"x = " + b"[" * 3000 + b"]" * 3000, b"x = " + b"{a=" * 3000, b"[" + b"a." * 3000 + b"a]",
    b"x = 0x" + b"f" * 9000, b"x = " + b"9" * 9000, b"x = 1e999", b"seed = 0x" + b"f" * 5000, b"[[x]]\n" * 3000,
    b'"\\u0000" = 1', b"x = 9999-99-99", b"name = 2020-01-01T00:00:00Z", b"seed = -nan",
)  # fmt: skip


def toml(value: Any) -> str:
    """A value as TOML, as far as it can be; keys are quoted."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{text(str(key))} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool) or value is None:
        return str(bool(value)).lower()
    return text(value) if isinstance(value, str) else repr(value)


def text(value: str) -> str:
    return '"' + "".join(c if c.isalnum() and c.isascii() else f"\\U{ord(c):08x}" for c in value) + '"'


def document(tables: Any) -> bytes:
    if not isinstance(tables, dict):
        return toml(tables).encode()
    return "\n".join(f"{text(str(key))} = {toml(value)}" for key, value in tables.items()).encode()


def changed_toml(random: Random, sample: bytes) -> bytes:
    what = random.random()
    if what < 0.55:
        import tomllib

        return document(changed(random, tomllib.loads(sample.decode())))
    if what < 0.65:
        return random.choice(DEEP) + b"\n" + sample
    if what < 0.7:
        return sample.replace(b"\n", b"\n" + random.choice(DEEP) + b"\n", random.choice([1, 5]))
    return mangled(random, [sample], head=len(sample))


@pytest.mark.parametrize(
    ("read", "sample"),
    [
        (site_file.load_site, SITE),
        (config.load_federation, FEDERATION),
        (lambda path: config.load_scenario(str(path)), SCENARIO),
    ],
    ids=["site.toml", "federation.toml", "scenario"],
)
def test_a_malformed_file_is_read_or_refused(tmp_path, read, sample, thorough):
    path = tmp_path / "file.toml"

    def parse(content):
        path.write_bytes(content)
        return read(path)

    parse(sample)
    tally = survey(parse, lambda random: changed_toml(random, sample), thorough)
    assert set(tally) == {"read", "ConfigError"}


@pytest.mark.parametrize("key", ["ledger", "federation", "data.path", "data.cache", "guard.socket"])
@pytest.mark.parametrize("path", ["a\\u0000b", "a\\nb", "\\u001b[2J", "\\u202e"])
def test_a_path_that_cannot_be_printed_is_refused(tmp_path, key, path):
    (tmp_path / "site.toml").write_text(f'{key} = "{path}"\nname = "x"\n[policy]\ndeclared_size = 900\n')
    with pytest.raises(ConfigError, match="characters that no path should have") as caught:
        site_file.load_site(tmp_path / "site.toml")
    accepted(caught.value)


def test_a_sites_file_with_anything_in_place_of_a_value_is_read_or_refused(tmp_path, thorough):
    import tomllib

    whole, path = tomllib.loads(SITE.decode()), tmp_path / "site.toml"
    places = [(table, key) for table in (whole, whole["policy"], whole["data"], whole["guard"]) for key in table]
    characters = st.sampled_from("aZ0/\\.\"'\n\t\x00\x1b\x7f\u202e\u2028é ")
    values = st.recursive(
        st.booleans() | st.integers() | st.floats() | st.text(characters, max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(characters, max_size=4), inner, max_size=3),
        max_leaves=5,
    )

    @hypotheses(thorough)
    @given(st.sampled_from(range(len(places))), values)
    def check(place, value):
        holder, key = places[place]
        kept, holder[key] = holder[key], value
        try:
            path.write_bytes(document(whole))
            site = site_file.load_site(path)
            assert all(
                "\x00" not in str(one) for one in (site.ledger, site.federation, site.data.path, site.data.cache)
            )
        except ConfigError as error:
            accepted(error)
        finally:
            holder[key] = kept

    check()
