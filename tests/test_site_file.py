"""`site.toml`: what is written loads back, and what is wrong is refused in one line."""

import math
import tomllib

import pytest

from fl_dpgan.errors import ConfigError
from fl_dpgan.privacy.policy import Policy
from fl_dpgan.site_file import GuardSettings, SiteData, SiteFile, load_site, template

LEAST = '{0}name = "clinic"\n[policy]\ndeclared_size = 900\n{1}'


def written(tmp_path, text):
    path = tmp_path / "site.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("size", [1, 900, 10_000, 10_001, 123_457, 10**10])
def test_the_template_loads_back_to_the_defaults(tmp_path, size):
    site = load_site(written(tmp_path, template("clinic-1", size)))
    assert site.name == "clinic-1" and site.budget == "main"
    defaults = Policy(declared_size=size, delta=min(1e-5, 1 / (10 * size)))
    assert site.policy == defaults.model_copy(update={"order": defaults.ledger_order})  # computed once, and written
    assert site.policy.account("clinic-1") == defaults.account("clinic-1")
    assert site.policy.delta <= 1 / (10 * size)
    assert site.ledger == tmp_path / "ledger.sqlite"


def test_the_template_has_every_key_and_a_comment_above_each():
    lines = template("clinic", 900).splitlines()
    raw = tomllib.loads("\n".join(lines))
    assert set(raw) == set(SiteFile.model_fields)
    tables = {"policy": Policy, "data": SiteData, "guard": GuardSettings}
    assert all(set(raw[table]) == set(kind.model_fields) for table, kind in tables.items()) and raw["labels"] == {}
    keys = [n for n, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert len(keys) == len(raw) - 4 + sum(len(raw[table]) for table in tables)
    keys.append(lines.index("[labels]"))
    assert all(lines[n - 1].startswith("# ") and len(lines[n - 1]) > 10 for n in keys)


@pytest.mark.parametrize(("name", "size"), [("", 9), ("a b", 9), ("ä", 9), ('x"', 9), ("x\n", 9), ("a" * 65, 9),
                                            ("-x", 9), ("x", 0), ("x", -3), ("x", 10**10 + 1)])  # fmt: skip
def test_a_template_for_an_impossible_name_or_size_is_refused_in_one_line(name, size):
    with pytest.raises(ConfigError) as caught:
        template(name, size)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ledger", ["ledger.sqlite", "deep/er/l.sqlite", "../l.sqlite"])
def test_a_relative_ledger_starts_at_the_file_and_not_at_the_working_directory(tmp_path, monkeypatch, ledger):
    (tmp_path / "etc").mkdir()
    path = written(tmp_path / "etc", LEAST.format(f'ledger = "{ledger}"\n', ""))
    monkeypatch.chdir(tmp_path)
    assert load_site(path.relative_to(tmp_path)).ledger == tmp_path / "etc" / ledger


def test_an_absolute_ledger_stays(tmp_path):
    path = written(tmp_path, LEAST.format('ledger = "/var/lib/l.sqlite"\n', ""))
    assert str(load_site(path).ledger) == "/var/lib/l.sqlite"


def test_name_and_declared_size_are_enough(tmp_path):
    site = load_site(written(tmp_path, LEAST.format("", "")))
    assert site.policy == Policy(declared_size=900)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "name"),
        ('name = "clinic"\n', "policy"),
        ('name = "clinic"\n[policy]\n', "policy.declared_size"),
        (LEAST.format("color = 1\n", ""), "unknown key 'color'"),
        (LEAST.format("", "sigma = 1\n"), "unknown key 'policy.sigma'"),
        (LEAST.format("", "[other]\n"), "unknown key 'other'"),
        (LEAST.format("", 'eps_max = "much"\n'), "policy.eps_max"),
        (LEAST.format("", "eps_max = nan\n"), "policy.eps_max"),
        (LEAST.format("", "eps_max = inf\n"), "policy.eps_max"),
        (LEAST.format("", "eps_max = 0\n"), "policy.eps_max"),
        (LEAST.format("", "delta = 1e-3\n"), "delta"),
        (LEAST.format("", 'unit = "person"\n'), "policy.unit"),
        (LEAST.format("", 'mechanisms = ["loss"]\n'), "policy.mechanisms"),
        (LEAST.format("", "largest_d_steps = 2.5\n"), "policy.largest_d_steps"),
        (LEAST.format("", "order = 64.0\n"), "policy.order"),
        (LEAST.format("", "order = 2.5\n"), "policy.order"),
        (LEAST.format("", "order = nan\n"), "policy.order"),
        (LEAST.format("", 'order = "best"\n'), "policy.order"),
        (LEAST.format("", "declared_size = 901\n"), "cannot be read as TOML"),
        (LEAST.format("ledger = 3\n", ""), "ledger"),
        ('name = "a clinic"\n[policy]\ndeclared_size = 900\n', "name"),
        ("name = clinic", "cannot be read as TOML"),
    ],
)
def test_a_faulty_file_is_refused_in_one_line_that_names_the_key_and_the_file(tmp_path, text, reason):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_site(path)
    assert reason in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_says_how_to_write_one(tmp_path):
    with pytest.raises(ConfigError, match="fl-dpgan site init"):
        load_site(tmp_path / "site.toml")


@pytest.mark.parametrize("kind", ["latin", "folder"])
def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path, kind):
    path = tmp_path / "site.toml"
    path.mkdir() if kind == "folder" else path.write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_site(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("eps", [0.1, 1 / 3, 1e-7, 999.9999999999999])
def test_numbers_are_written_so_that_they_read_back_exactly(tmp_path, eps):
    text = template("clinic", 900).replace("eps_max = 10.0", f"eps_max = {eps!r}")
    assert math.isclose(load_site(written(tmp_path, text)).policy.eps_max, eps, rel_tol=0)
