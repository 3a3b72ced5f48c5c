"""The verifier, against ledgers that this file writes itself: neither the writer's code nor the verifier's is used."""

import ast
import hashlib
import json
import math
import random
import re
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting import rdp
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fl_dpgan.errors import LedgerError
from fl_dpgan.privacy import verify as module
from fl_dpgan.privacy.verify import verify

TABLE = "CREATE TABLE entries (seq INTEGER PRIMARY KEY, kind TEXT, payload TEXT, previous TEXT, hash TEXT) STRICT"
# a writer may add constraints, and columns that are computed from the payload, with indexes on them
INDEXED = TABLE.replace("hash TEXT", "hash TEXT NOT NULL UNIQUE, budget TEXT AS (payload ->> '$.budget') VIRTUAL")
INDEX = "CREATE INDEX entries_budgets ON entries (budget)"
TRIGGERS = {
    "entries_no_update": "BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END",
    "entries_no_delete": "BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END",
    "entries_no_replace": "BEFORE INSERT ON entries WHEN EXISTS (SELECT 1 FROM entries WHERE seq >= NEW.seq) "
    "BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END",
}
ACCOUNT = {
    "format": 1,
    "site": "north",
    "declared_size": 500,
    "eps_max": 8.0,
    "delta": 1e-5,
    "order": 6.0,
    "unit": "image",
    "relation": "add/remove one",
    "time": 1.0,
}
CHARGE = {
    "mechanism": "discriminator_update",
    "sample_rate": 0.1,
    "noise_multiplier": 1.5,
    "count": 5,
    "clipping_norm": 1.25,
    "run": "run-1",
    "round": 1,
    "request": "request-1",
    "share": 4.0,
    "plan": "ab" * 32,
    "budget": "main",
    "delta": 1e-5,
    "time": 2.0,
}
EAST = {"name": "east", "declared_size": 300, "reason": "another hospital's patients", "time": 2.0}


def account(**changes):
    return "account", {**ACCOUNT, **changes}


def charge(**changes):
    return "charge", {**CHARGE, **changes}


def disjoint(**changes):
    return "disjoint", {**EAST, **changes}


def release(event, **changes):
    return "release", {"event": event, "digest": "0f" * 32, "time": 2.0, **changes}


def canonical(payload):
    return json.dumps(payload, sort_keys=True, separators=(",", ":"))


def sealed(seq, kind, text, previous):
    digest = hashlib.sha256(f"{seq}\n{kind}\n{text}\n{previous}".encode()).hexdigest()
    return seq, kind, text, previous, digest


def chained(entries):
    """The rows of entries given as (kind, payload), or (kind, text)."""
    previous, rows = "0" * 64, []
    for seq, (kind, payload) in enumerate(entries, 1):
        rows.append(sealed(seq, kind, payload if isinstance(payload, str) else canonical(payload), previous))
        previous = rows[-1][-1]
    return rows


def write(path, rows, *, table=TABLE, triggers=TRIGGERS):
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN")
        db.execute(table)
        for name, body in triggers.items():
            db.execute(f"CREATE TRIGGER {name} {body}")
        if table == INDEXED:
            db.execute(INDEX)
        db.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", rows)
        db.execute("COMMIT")
    return path


def edit(path, sql, values=()):
    """Change rows as somebody would who knows of the triggers."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("BEGIN")
        for name in TRIGGERS:
            db.execute(f"DROP TRIGGER {name}")
        changed = db.execute(sql, values).rowcount
        for name, body in TRIGGERS.items():
            db.execute(f"CREATE TRIGGER {name} {body}")
        db.execute("COMMIT")
    return changed


def history():
    """20 entries of every kind."""
    entries = [account(), disjoint()]
    for i in range(9):
        budget = "east" if i % 3 == 2 else "main"
        mechanism = "evaluation_count" if i == 4 else "discriminator_update"
        details = {"round": i + 1, "request": f"request-{i}", "count": i + 2, "clipping_norm": 4 / (i + 3)}
        entries.append(charge(**details, budget=budget, mechanism=mechanism, time=3.0 + 2 * i))
        entries.append(release(len(entries), digest=f"{i:064x}", time=4.0 + 2 * i))
    return entries


@pytest.fixture
def path(tmp_path):
    return tmp_path / "site.sqlite"


def expect(message, path, anchor=None):
    with pytest.raises(LedgerError, match=message) as caught:
        verify(path, anchor)
    assert str(path) in str(caught.value)


def test_the_verifier_shares_no_code_with_the_writer():
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names} == {"fl_dpgan.errors"}


# --- a ledger that holds


def test_the_figures_of_an_intact_ledger(path):
    entries = [*history(), charge(count=7, time=90.0)]
    rows = chained(entries)
    found = verify(write(path, rows))
    assert (found.site, found.unit, found.relation) == ("north", "image", "add/remove one")
    assert (found.eps_max, found.delta, found.order) == (8.0, 1e-5, 6.0)
    assert (found.entries, found.head) == (21, rows[-1][-1])
    assert (found.releases_unknown, found.notes) == (1, ())
    main, east = found.budgets
    assert (main.name, main.declared_size, main.events) == ("main", 500, 7)
    assert main.d_steps == 2 + 3 + 5 + 8 + 9 + 7  # without the evaluation's 6
    assert (east.name, east.declared_size, east.events, east.d_steps) == ("east", 300, 3, 4 + 7 + 10)
    assert main.epsilon == pytest.approx(published([(0.1, 1.5, 40)], 6, 1e-5), rel=1e-9)
    assert east.epsilon == pytest.approx(published([(0.1, 1.5, 21)], 6, 1e-5), rel=1e-9)


def test_an_account_alone_has_spent_nothing(path):
    (main,) = verify(write(path, chained([account()]))).budgets
    assert (main.events, main.d_steps, main.epsilon) == (0, 0, 0.0)


def test_real_numbers_may_be_written_as_whole_ones(path):
    found = verify(write(path, chained([account(eps_max=8, order=6), charge(sample_rate=1, noise_multiplier=20)])))
    assert (found.eps_max, found.order) == (8.0, 6.0)
    assert found.budgets[0].epsilon == pytest.approx(published([(1.0, 20.0, 5)], 6, 1e-5), rel=1e-6)


def test_a_clock_that_goes_back_is_a_note(path):
    entries = [account(time=10.0), charge(time=20.0), charge(time=15.0), charge(time=15.0), release(2, time=14.0)]
    assert verify(write(path, chained(entries))).notes == ("clock went back at entry 3", "clock went back at entry 5")


# --- epsilon


def published(events, order, delta):
    """Epsilon by dp-accounting, at one order."""
    return accountant_of(events, order).get_epsilon(delta)


def accountant_of(events, order):
    accountant = rdp.RdpAccountant(orders=[order])
    for rate, sigma, count in events:
        step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        accountant.compose(step, count)
    return accountant


rates = st.sampled_from([1.0]) | st.floats(1e-3, 1.0)


# dp-accounting's floats lose a cost per step below 1e-7 or so: hence no rates and multipliers that go there together
@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(st.tuples(rates, st.floats(0.3, 8.0), st.integers(1, 1000)), min_size=1, max_size=3),
    order=st.sampled_from([2, 3, 5, 8, 17, 32, 63, 128, 256]),
    delta=st.sampled_from([1e-3, 1e-5, 1e-8]),
)
@example(events=[(0.01, 0.01, 1)], order=512, delta=1e-5)
@example(events=[(1.0, 0.01, 1)], order=512, delta=1e-5)
@example(events=[(0.5, 50.0, 1000)], order=512, delta=1e-5)
@example(events=[(0.1, 1.5, 1)], order=2, delta=0.9)
@example(events=[(0.001, 2.0, 1)], order=2, delta=1e-3)
def test_epsilon_is_that_of_an_independent_accountant(events, order, delta, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "epsilon.sqlite"
    charges = [charge(sample_rate=q, noise_multiplier=s, count=n, delta=delta) for q, s, n in events]
    write(path, chained([account(order=float(order), delta=delta, eps_max=1e12), *charges]))
    expected = published(events, order, delta)
    cost = float(accountant_of(events, order)._rdp[0])
    if -math.expm1(-cost) < delta**2:
        # for so small a cost dp-accounting has another bound, which gives 0; the ledger keeps to its one formula
        assert expected == 0
        expected = max(0.0, cost + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    assert verify(path).budgets[0].epsilon == pytest.approx(expected, rel=1e-6)


def test_a_step_of_next_to_no_cost_is_counted_as_the_writer_counts_it(path):
    entries = [account(), charge(sample_rate=1e-9, noise_multiplier=1e6, count=10**9)]
    cost = 1e-12 * 1e9 + math.log1p(-1 / 6) - math.log(1e-5 * 6) / 5
    assert verify(write(path, chained(entries))).budgets[0].epsilon == pytest.approx(cost, rel=1e-12)


def test_a_cost_that_floats_lose_is_exact(path):
    count, step = (
        10**9,
        math.log1p(1e-5**2 * math.expm1(1 / 3.0**2)),
    )  # at order 2 the sum is 1 + q^2 (e^(1/sigma^2) - 1)
    entries = [account(order=2, eps_max=20.0), charge(sample_rate=1e-5, noise_multiplier=3.0, count=count)]
    offset = math.log(1 / 2) - math.log(2e-5)
    spent = verify(write(path, chained(entries))).budgets[0].epsilon
    assert spent - offset == pytest.approx(count * step, rel=1e-9)


# --- the filter


def test_each_budget_has_the_cap_to_itself(path):
    full = 1
    while published([(0.1, 1.5, full + 1)], 6, 1e-5) <= 8.0:
        full += 1
    entries = [account(), disjoint(), charge(count=full), charge(count=full, budget="east")]
    assert all(7.9 < budget.epsilon <= 8.0 for budget in verify(write(path, chained(entries))).budgets)
    write(path, chained([*entries, charge(count=1, budget="east")]))
    expect("entry 5: .*'east'.* epsilon = 8.0.*beyond eps_max = 8.0", path)
    # the cap is refused where it is passed, whatever follows
    write(path, chained([*entries, charge(count=1), release(3)]))
    expect("entry 5: .*'main'", path)


def test_the_cap_is_met_to_one_part_in_a_million(path):
    spent = verify(write(path, chained([account(), charge()]))).budgets[0].epsilon
    verify(write(path, chained([account(eps_max=spent / (1 + 9e-7)), charge()])))
    write(path, chained([account(eps_max=spent / (1 + 1.1e-6)), charge()]))
    expect("beyond eps_max", path)


# --- the form


def without(entry, key):
    kind, payload = entry
    return kind, {k: v for k, v in payload.items() if k != key}


BIG = 10**400
FORMS = {
    "seven": ([account(), charge(), ("seven", CHARGE)], "entry 3: its kind 'seven'"),
    "no account": ([charge()], "entry 1: .*one account"),
    "second account": ([account(), account()], "entry 2: .*one account"),
    "no entries": ([], "no entries"),
    "format": ([account(format=2)], "format = 2"),
    "format true": ([account(format=True)], "format = True"),
    "site": ([account(site="")], "site = ''"),
    "unit": ([account(unit="ward")], "unit = 'ward'"),
    "relation": ([account(relation="replace one")], "relation = 'replace one'"),
    "declared size": ([account(declared_size=0)], "declared_size = 0"),
    "declared size real": ([account(declared_size=5.0)], "declared_size = 5.0"),
    "cap": ([account(eps_max=0.0)], "eps_max = 0.0"),
    "cap true": ([account(eps_max=True)], "eps_max = True"),
    "cap big": ([account(eps_max=BIG)], "eps_max = 1000"),
    "cap text": ([account(eps_max="8")], "eps_max = '8'"),
    "delta 0": ([account(delta=0.0)], "delta = 0.0"),
    "delta 1": ([account(delta=1.0)], "delta = 1.0"),
    "order": ([account(order=1.0)], "order = 1.0"),
    "order fraction": ([account(order=2.5)], "order = 2.5"),
    "order beyond": ([account(order=1e15)], "order = 1000"),
    "account time": ([account(time=None)], "time = None"),
    "account field": ([account(extra=1)], r"\['extra'\]"),
    "account lacks": ([without(account(), "unit")], r"\['unit'\]"),
    "charge lacks": ([account(), without(charge(), "share")], r"entry 2: .*\['share'\]"),
    "charge field": ([account(), charge(epsilon=1.0)], r"\['epsilon'\]"),
    "disjoint lacks": ([account(), without(disjoint(), "reason")], r"\['reason'\]"),
    "release field": ([account(), charge(), release(2, note="")], r"\['note'\]"),
    "mechanism": ([account(), charge(mechanism="poisson_gaussian")], "mechanism = 'poisson_gaussian'"),
    "rate 0": ([account(), charge(sample_rate=0.0)], "sample_rate = 0.0"),
    "rate above 1": ([account(), charge(sample_rate=1.0000000000000002)], "sample_rate = 1.00"),
    "sigma": ([account(), charge(noise_multiplier=0.0099)], "noise_multiplier = 0.0099"),
    "sigma text": ([account(), charge(noise_multiplier="1.5")], "noise_multiplier = '1.5'"),
    "count 0": ([account(), charge(count=0)], "count = 0"),
    "count less": ([account(), charge(count=-5)], "count = -5"),
    "count real": ([account(), charge(count=5.0)], "count = 5.0"),
    "count true": ([account(), charge(count=True)], "count = True"),
    "count big": ([account(), charge(count=BIG)], "count = 1000"),
    "clipping": ([account(), charge(clipping_norm=-1.0)], "clipping_norm = -1.0"),
    "clipping list": ([account(), charge(clipping_norm=[1.0])], r"clipping_norm = \[1.0\]"),
    "run": ([account(), charge(run=7)], "run = 7"),
    "round": ([account(), charge(round=1.0)], "round = 1.0"),
    "request": ([account(), charge(request=None)], "request = None"),
    "share": ([account(), charge(share=-0.5)], "share = -0.5"),
    "plan": ([account(), charge(plan=1)], "plan = 1"),
    "charge time": ([account(), charge(time="now")], "time = 'now'"),
    "charge delta": ([account(), charge(delta=2e-5)], "entry 2: delta = 2e-05 is not the account's"),
    "budget unknown": ([account(), charge(budget="east")], "entry 2: .*'east'.*not declared"),
    "budget later": ([account(), charge(budget="east"), disjoint()], "entry 2: .*'east'.*not declared"),
    "budget type": ([account(), charge(budget=["main"])], "budget = "),
    "main again": ([account(), disjoint(name="main")], "entry 2: .*'main'.*exists already"),
    "east again": ([account(), disjoint(), disjoint()], "entry 3: .*'east'.*exists already"),
    **{
        f"{what} named {name!r}": (entries, f"entry {len(entries)}: {key} = .* is not a name")
        for name in ("a b", "n" * 65, "-a", ".a", "\u00e4", "a\n", "a/b", "\x1b[31m", "\u202ea", 7)
        for what, key, entries in (
            ("site", "site", [account(site=name)]),
            ("budget", "name", [account(), disjoint(name=name)]),
        )
    },
    "nameless": ([account(), disjoint(name="")], "name = ''"),
    "no reason": ([account(), disjoint(reason=" \n")], "reason = "),
    "disjoint size": ([account(), disjoint(declared_size=-1)], "declared_size = -1"),
    "release of none": ([account(), charge(), release(9)], "entry 3: releases entry 9"),
    "release of itself": ([account(), charge(), release(3)], "entry 3: releases entry 3"),
    "release of later": ([account(), release(3), charge()], "entry 2: releases entry 3"),
    "release of account": ([account(), release(1)], "entry 2: releases entry 1"),
    "release of 0": ([account(), charge(), release(0)], "event = 0"),
    "release twice": ([account(), charge(), release(2), release(2)], "entry 4: releases entry 2.*before"),
    "release digest": ([account(), charge(), release(2, digest="0F" * 32)], "digest = "),
    "release newline": ([account(), charge(), release(2, digest="0f" * 32 + "\n")], "digest = "),
    "release event": ([account(), charge(), release(True)], "event = True"),
}


@pytest.mark.parametrize("entries, message", FORMS.values(), ids=FORMS)
def test_an_entry_out_of_form_is_refused_though_its_hash_is_right(entries, message, path):
    write(path, chained(entries))
    expect(message, path)


TEXTS = {
    "spaces": json.dumps(CHARGE, sort_keys=True),
    "unsorted": json.dumps(CHARGE, separators=(",", ":")),
    "repeated": canonical(CHARGE)[:-1] + ',"time":2.0}',
    "repeated first": '{"budget":"east",' + canonical(CHARGE)[1:],
    "exponent": canonical(CHARGE).replace('"count":5', '"count":5e0'),
    "not ascii": canonical({**CHARGE, "run": "é"}).replace("\\u00e9", "é"),
    "newline": canonical(CHARGE) + "\n",
    "nan": canonical({**CHARGE, "time": math.nan}),
    "infinity": canonical({**CHARGE, "time": math.inf}),
    "infinite exponent": canonical(CHARGE).replace('"time":2.0', '"time":1e999'),
    "digits": canonical(CHARGE).replace('"count":5', '"count":' + "9" * 5000),
    "list": "[]",
    "number": "1",
    "empty": "",
    "cut": canonical(CHARGE)[:-1],
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_payload_that_is_not_canonical_is_refused_though_its_hash_is_right(text, path):
    write(path, chained([account(), ("charge", text)]))
    expect("entry 2: .*payload", path)


# --- the chain


def test_an_edited_entry_is_named(path):
    write(path, chained(history()))
    payload = canonical({**history()[4][1], "count": 1})
    assert edit(path, "UPDATE entries SET payload = ? WHERE seq = 5", [payload]) == 1
    expect("entry 5: .*own hash", path)


def test_an_edit_with_its_own_hash_put_right_breaks_the_chain_behind_it(path):
    rows = chained(history())
    rows[4] = sealed(5, "charge", canonical({**history()[4][1], "count": 1}), rows[3][-1])
    write(path, rows)
    expect("entry 6: .*continue", path)


def test_a_row_taken_out_put_in_or_moved_is_refused(path):
    rows = chained(history())
    write(path, [*rows[:4], *rows[5:]])
    expect("entry 5: stands at seq 6", path)
    write(path, [(seq - (seq > 5), *rest) for seq, *rest in [*rows[:4], *rows[5:]]])
    expect("entry 5: .*continue", path)
    write(path, [(0, *rows[0][1:]), *rows])
    expect("entry 1: stands at seq 0", path)
    write(path, rows[1:])
    expect("entry 1: stands at seq 2", path)
    write(path, [*rows[:3], (4, *rows[5][1:]), rows[4], (6, *rows[3][1:]), *rows[6:]])
    expect("entry 4: ", path)


@pytest.mark.parametrize("column", ["kind", "payload", "previous", "hash"])
@pytest.mark.parametrize("value", [None, b"charge", 7, 7.5])
def test_a_value_of_another_type_is_refused(column, value, path):
    loose = TABLE.replace(" STRICT", "").replace(" TEXT", " BLOB")
    row = list(chained(history())[2])
    row[["seq", "kind", "payload", "previous", "hash"].index(column)] = value
    write(path, [*chained(history())[:2], row], table=loose)
    with closing(sqlite3.connect(path)) as db:  # only the schema's text says that the table was strict all along
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'entries'", [TABLE])
        db.commit()
    expect("damaged|type", path)


def test_text_that_is_not_utf8_is_refused(path):
    write(path, chained(history()))
    edit(path, "UPDATE entries SET kind = CAST(x'ff636861' AS TEXT) WHERE seq = 3")
    expect("entry 3|UTF-8", path)


# --- the anchor


def test_an_anchor_is_the_hash_of_any_entry(path):
    rows = chained(history())
    write(path, rows)
    assert all(verify(path, row[-1]) == verify(path) for row in rows)


def test_a_cut_tail_is_seen_with_the_anchor_alone(path):
    rows = chained(history())
    write(path, rows[:-4])
    assert verify(path).entries == 16
    assert verify(path, rows[15][-1]).entries == 16
    expect("older than the ledger", path, rows[-1][-1])


def test_a_forged_chain_is_seen_with_the_anchor_alone(path):
    anchor = chained(history())[-1][-1]
    forged = history()
    forged[-2][1]["count"] = 1
    write(path, chained(forged))
    assert verify(path).entries == 20
    expect("older than the ledger", path, anchor)
    # a tail of other entries, grown past the length of the true one
    write(path, chained([*history()[:-4], *(charge(count=1, time=30.0 + i) for i in range(8))]))
    assert verify(path).entries == 24
    expect("older than the ledger", path, anchor)


@pytest.mark.parametrize("anchor", ["", "0" * 63, "g" * 64, "0" * 64 + "\n", "0" * 65])
def test_an_anchor_that_is_no_hash_is_refused(anchor, path):
    write(path, chained(history()))
    expect("not a hash", path, anchor)


# --- the file


def test_what_is_not_a_ledger_is_refused(tmp_path):
    expect("no ledger at", tmp_path / "missing.sqlite")
    expect("no ledger at", tmp_path)
    for name, content in {
        "empty": b"",
        "text": b"SQLite this is not " * 500,
        "noise": random.Random(0).randbytes(9000),
    }.items():
        (tmp_path / name).write_bytes(content)
        expect("ledger|not a database", tmp_path / name)
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as db:
        db.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY)")
    expect("not a ledger", tmp_path / "other.sqlite")


TABLES = {
    "loose": TABLE.replace(" STRICT", ""),
    "a column more": TABLE.replace("hash TEXT", "hash TEXT, note TEXT"),
    # it would be read in the payload's place, and no hash covers it
    "a stored copy": TABLE.replace("hash TEXT", "hash TEXT, budget TEXT AS (payload ->> '$.budget') STORED"),
    "other order": TABLE.replace("previous TEXT, hash TEXT", "hash TEXT, previous TEXT"),
    "other type": TABLE.replace("payload TEXT", "payload ANY"),
    "no key": TABLE.replace(" PRIMARY KEY", ""),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_of_another_form_is_refused(table, path):
    with closing(sqlite3.connect(path)) as db:
        db.execute(table)
        for name, body in TRIGGERS.items():
            db.execute(f"CREATE TRIGGER {name} {body}")
    expect("not a ledger|not those of a ledger", path)


def test_an_index_that_says_other_than_its_rows_is_refused(path):
    content = write(path, chained(history()), table=INDEXED).read_bytes()
    damaged, found = re.subn(rb'(?<!")east(?!")', b"mast", content, count=1)
    assert found == 1
    path.write_bytes(damaged)
    expect("damaged", path)


def test_a_view_in_the_tables_place_is_refused(path):
    with closing(sqlite3.connect(path)) as db:
        db.execute(TABLE.replace("entries", "others"))
        db.execute("CREATE VIEW entries AS SELECT * FROM others")
    expect("not a ledger", path)


@pytest.mark.parametrize("name", TRIGGERS)
def test_a_ledger_without_one_of_its_triggers_is_refused(name, path):
    others = {other: body for other, body in TRIGGERS.items() if other != name}
    write(path, chained(history()), triggers=others)
    expect(name, path)
    body = TRIGGERS[name]
    toothless = body.replace("RAISE(ABORT, 'entries are append-only')", "1")
    asleep = body.replace(" BEGIN", " AND 0 BEGIN" if "WHEN" in body else " WHEN 0 BEGIN")
    partly = body.replace("BEGIN ", "BEGIN SELECT RAISE(IGNORE) WHERE 0; ")
    for changed in (toothless, asleep, partly):
        assert changed != body
        write(path, chained(history()), triggers={**others, name: changed})
        expect(name, path)
    write(path, chained(history()), triggers={**others, f"{name}_ever": body})
    expect(name, path)


MORE = {
    "swallows charges": "BEFORE INSERT ON entries WHEN NEW.kind = 'charge' BEGIN SELECT RAISE(IGNORE); END",
    "swallows all": "BEFORE INSERT ON entries BEGIN SELECT RAISE(IGNORE); END",
    "after": "AFTER INSERT ON entries BEGIN SELECT 1; END",
    "update": "BEFORE UPDATE OF payload ON entries BEGIN SELECT RAISE(IGNORE); END",
    "delete": "BEFORE DELETE ON entries BEGIN SELECT RAISE(IGNORE); END",
    "aborts": "BEFORE INSERT ON entries WHEN NEW.seq > 99 BEGIN SELECT RAISE(ABORT, 'append-only'); END",
    "other case": "BEFORE INSERT ON ENTRIES WHEN NEW.kind = 'charge' BEGIN SELECT RAISE(IGNORE); END",
}


@pytest.mark.parametrize("name", ["entries_more", "charges", "entries_no_insert", "entries_no_update_ever"])
@pytest.mark.parametrize("body", MORE.values(), ids=MORE)
def test_a_trigger_more_on_the_entries_is_refused(name, body, path):
    write(path, chained(history()))
    assert verify(path).entries == 20
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"CREATE TRIGGER {name} {body}")
    expect("triggers that no ledger has", path)


def snapshot(folder):
    return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()}


def test_verifying_writes_nothing_and_needs_no_log_beside_the_file(tmp_path):
    path = write(tmp_path / "a name with ? # and % in it.sqlite", chained(history()))
    before = snapshot(tmp_path)
    assert list(before) == [path.name]
    verify(path)
    assert snapshot(tmp_path) == before


def test_what_is_still_in_the_log_is_read(tmp_path):
    path, rows = tmp_path / "site.sqlite", chained(history())
    link = tmp_path / "elsewhere" / "link.sqlite"
    link.parent.mkdir()
    link.symlink_to(path)
    write(path, rows[:10])
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("PRAGMA wal_autocheckpoint = 0")
        writer.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", rows[10:])
        assert verify(path).entries == verify(link).entries == 20
        copies = tmp_path / "copies"
        copies.mkdir()
        for name in ("site.sqlite", "site.sqlite-wal"):
            shutil.copy(tmp_path / name, copies)
        shutil.copy(path, tmp_path / "alone.sqlite")
    before = snapshot(copies)
    assert verify(copies / "site.sqlite").entries == 20
    assert snapshot(copies) == before
    assert verify(tmp_path / "alone.sqlite").entries == 10  # the file without its log: a truncated tail


def test_a_ledger_written_to_while_it_is_read_is_not_judged(path, monkeypatch):
    rows = chained(history())
    write(path, rows[:10])
    connect = sqlite3.connect

    def writes_first(*args, **options):
        monkeypatch.setattr(sqlite3, "connect", connect)
        opened = connect(*args, **options)
        with closing(connect(path, isolation_level=None)) as writer:
            writer.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", rows[10:])
        return opened

    monkeypatch.setattr(sqlite3, "connect", writes_first)
    expect("verify it again", path)
    assert verify(path).entries == 20


# --- a thousand edits


def passes(path):
    """Whether nothing is seen; an error of another type is an error of the test."""
    try:
        verify(path)
    except LedgerError:
        return False
    return True


def nudged(value, rng):
    """Another value of the same type, as near as can be."""
    if isinstance(value, float):
        return math.nextafter(value, rng.choice([-math.inf, math.inf]))
    if isinstance(value, int):
        return value + rng.choice([-1, 1])
    at = rng.randrange(len(value))
    return value[:at] + rng.choice([c for c in "0123456789abcdef" if c != value[at]]) + value[at + 1 :]


def edited(row, rng):
    """An UPDATE of one field of one entry: of a column, or of one key of its payload."""
    seq, kind, text, previous, digest = row
    payload = json.loads(text)
    field = rng.choice([*payload, "seq", "kind", "previous", "hash"])
    if field in payload:
        value = "main" if field == "budget" and payload[field] == "east" else nudged(payload[field], rng)
        return field, "payload", canonical({**payload, field: value})
    if field == "seq":
        return field, "seq", rng.choice([0, -seq, seq + 20, 2**40])
    others = {"kind": rng.choice([k for k in ("charge", "release", "disjoint", "account") if k != kind])}
    return field, field, others.get(field) or nudged({"previous": previous, "hash": digest}[field], rng)


@pytest.mark.parametrize("table", [TABLE, INDEXED], ids=["plain", "indexed"])
def test_500_edits_of_a_single_field_are_all_caught(table, tmp_path):
    rng, rows, fields = random.Random(1), chained(history()), set()
    whole = write(tmp_path / "whole.sqlite", rows, table=table)
    path = tmp_path / "site.sqlite"
    assert verify(whole).entries == 20
    for trial in range(500):
        shutil.copy(whole, path)
        row = rows[trial % 3] if trial % 2 else rng.choice(rows)  # the account's and the declaration's share is small
        field, column, value = edited(row, rng)
        assert value not in row
        assert edit(path, f"UPDATE entries SET {column} = ? WHERE seq = ?", [value, row[0]]) == 1
        if passes(path):
            pytest.fail(f"trial {trial}: {field} of entry {row[0]} became {value!r}, unseen")
        fields.add(field)
    assert fields >= {*CHARGE, *ACCOUNT, *EAST, "event", "digest", "seq", "kind", "previous", "hash"}


def cells(content, rows):
    """For each row, where its cell lies in the file: (start of the cell, of its first column's bytes, its end)."""
    for _, kind, text, previous, digest in rows:
        body = (kind + text + previous + digest).encode()
        assert content.count(body) == 1
        at = content.index(body)
        header = 1 + 1 + 1 + (1 if 13 + 2 * len(text) < 128 else 2) + 2 + 2  # its length; types of seq, kind, ... hash
        size = header + len(body)
        start = at - header - 1 - (1 if size < 128 else 2)  # the row's number, the cell's size
        assert content[at - header] == header
        yield start, at - header, at, at + len(body)


@pytest.mark.parametrize("table", [TABLE, INDEXED], ids=["plain", "indexed"])
def test_500_edits_of_a_single_byte_are_all_caught(table, tmp_path):
    rng, rows = random.Random(2), chained(history())
    whole = write(tmp_path / "whole.sqlite", rows, table=table)
    path, content = tmp_path / "site.sqlite", whole.read_bytes()
    assert verify(whole).entries == 20
    places = list(cells(content, rows))
    heads = 0
    for trial in range(500):
        start, header, body, end = rng.choice(places)
        in_head = trial % 4 == 0
        # header + 1 is the type of a value that SQLite never reads: see the test below
        at = rng.choice([*range(start, header + 1), *range(header + 2, body)]) if in_head else rng.randrange(body, end)
        heads += in_head
        change = 1 << rng.randrange(8) if trial % 2 else rng.randrange(1, 256)
        damaged = bytearray(content)
        damaged[at] ^= change
        path.write_bytes(damaged)
        if passes(path):
            pytest.fail(f"trial {trial}: byte {at - start} of a cell became {damaged[at]}, unseen")
    assert heads == 125


def test_the_one_byte_of_a_row_that_says_nothing_changes_nothing(tmp_path):
    """The number of a row is its key; for the column `seq` the row holds a null, whose type SQLite does not look at."""
    rows = chained(history())
    whole = write(tmp_path / "whole.sqlite", rows)
    path, content, unseen = tmp_path / "site.sqlite", whole.read_bytes(), 0
    _, header, _, _ = list(cells(content, rows))[4]
    for value in range(1, 256):
        damaged = bytearray(content)
        assert damaged[header + 1] == 0
        damaged[header + 1] = value
        path.write_bytes(damaged)
        if passes(path):
            unseen += 1
            assert verify(path) == verify(whole)
    assert unseen == 6  # the types of values without bytes


def test_no_damage_to_the_file_is_an_error_of_another_type(tmp_path):
    rng = random.Random(3)
    whole = write(tmp_path / "whole.sqlite", chained(history()), table=INDEXED)
    path, content, figures = tmp_path / "site.sqlite", whole.read_bytes(), verify(whole)
    seen = 0
    for trial in range(600):
        damaged = bytearray(content)
        if trial % 6 == 0:
            del damaged[rng.randrange(len(content)) :]
        else:
            # the first page describes the file and its tables
            damaged[rng.randrange(4096 if trial % 2 else len(content))] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        if not passes(path):
            seen += 1
        else:
            assert verify(path) == figures  # a byte of free space, or of a comment
    assert 200 < seen < 600


def test_a_ledger_of_100_000_charges_is_verified(path):
    entries = [account(eps_max=1e6), *(charge(count=i % 7 + 1, round=i, time=float(i)) for i in range(100_000))]
    write(path, chained(entries))
    assert verify(path).budgets[0].events == 100_000
