"""A site's policy and its ledger's newest hash win over the server; a refusal is named, uncharged, hurts no other."""

import shutil
import sqlite3

import pytest

from fl_dpgan.config import Plan
from fl_dpgan.errors import DataError, FederationError, LedgerError
from fl_dpgan.federation import FedDPGAN, Policy, Records, Site, wire
from fl_dpgan.federation import site as site_module
from fl_dpgan.privacy.accountant import ORDERS
from fl_dpgan.privacy.entries import Declaration
from fl_dpgan.privacy.ledger import Ledger, LedgerReader
from fl_dpgan.runs import RunFolder
from tests.conftest import grid_sent


def ledger_path(fed, number=0):
    return fed.path / "ledgers" / f"site-{number}.sqlite"


def charges(fed, number=0):
    path = ledger_path(fed, number)
    return LedgerReader(path).charges() if path.exists() else []


def replan(fed, **privacy):
    raw = fed.plan.model_dump()
    fed.plan = Plan.model_validate({**raw, "privacy": {**raw["privacy"], **privacy}})
    return fed


def rounds(fed):
    return list(RunFolder(fed.path).rounds())


def statuses(record):
    return {name: (site["status"], site.get("rule", "")) for name, site in record["sites"].items()}


def ask(site, message):
    return wire.unpack(site.train(message), wire.Answer)[0]


def changed(message, **fields):
    """The same request with other fields in its header."""
    header, tensors = wire.unpack(message, wire.Request)
    message.content = wire.pack(header.model_copy(update=fields), tensors)
    return grid_sent(message)


# --- policy


@pytest.mark.parametrize(
    ("rule", "terms"),
    [
        ("eps_per_run", {"eps_per_run": 9.99}),
        ("largest_sample_rate", {"largest_sample_rate": 0.0999}),
        ("largest_batch_size", {"largest_batch_size": 3}),
        ("largest_clipping_norm", {"largest_clipping_norm": 1.49}),
        ("largest_d_steps", {"largest_d_steps": 1}),
        ("least_noise_multiplier", {"least_noise_multiplier": 50.0}),
        ("mechanisms", {"mechanisms": ["evaluation_count"]}),
        ("delta", {"delta": 2e-5}),
    ],
)
def test_invariant_4_a_refusal_is_logged_by_its_rule_uncharged_and_the_others_go_on(federation, rule, terms):
    fed = federation(sites=3, rounds=2)
    fed.sites[1] = fed.site(1, **terms)
    strategy = fed.strategy()
    strategy.start(fed.grid())
    for record in rounds(fed):
        assert statuses(record) == {"site-0": ("trained", ""), "site-1": ("refused", rule), "site-2": ("trained", "")}
        assert record["sites"]["site-1"]["epsilon"] == 0
    assert not ledger_path(fed, 1).exists()
    assert len(charges(fed, 0)) == len(charges(fed, 2)) == 2


def test_invariant_4_a_site_at_its_limits_takes_part(federation):
    fed = federation(rounds=1)
    fed.sites[0] = fed.site(
        0, eps_per_run=10.0, largest_sample_rate=0.1, largest_batch_size=4, largest_clipping_norm=1.5, largest_d_steps=2
    )
    fed.strategy().start(fed.grid())
    assert statuses(rounds(fed)[0])["site-0"] == ("trained", "")


def test_a_plan_for_another_declared_size_is_refused(federation):
    fed = federation()
    message = fed.request()
    plan = fed.plan.site_plan(39)
    answer = ask(fed.sites[0], changed(message, plan=plan))
    assert (answer.status, answer.rule) == ("refused", "declared_size")
    assert charges(fed) == []


def test_invariant_4_the_share_of_a_run_holds_though_the_budget_has_room(federation):
    fed = replan(federation(rounds=10), noise_multiplier=2.0, eps_max=2.0)
    site = fed.site(0, eps_max=10.0, eps_per_run=2.0)
    fed.sites[0] = site
    message = fed.request()
    answers = []
    for number in range(1, 400):  # the plan says 10 rounds; this server keeps asking
        answers.append(ask(site, changed(message, round=number)))
        if answers[-1].status != "trained":
            break
    assert (answers[-1].status, answers[-1].rule) == ("withdrawn", "share")
    assert len(answers) > 10
    ledger = LedgerReader(ledger_path(fed))
    assert 1.8 < ledger.epsilon("test") <= 2.0
    assert ledger.steps_left(charges(fed)[0].event) > 2
    other = ask(site, changed(message, run="another"))  # what is left of the budget is another run's
    assert other.status == "trained"
    assert LedgerReader(ledger_path(fed)).epsilon() > 2.0


def test_invariant_4_a_message_cannot_raise_the_share(federation):
    fed = replan(federation(), eps_max=2.0)
    site = fed.site(0, eps_max=10.0, eps_per_run=2.0)
    message = fed.request()
    header, _ = wire.unpack(message, wire.Request)
    answer = ask(site, changed(message, plan=header.plan.model_copy(update={"eps_max": 10.0})))
    assert (answer.status, answer.rule) == ("refused", "eps_per_run")
    assert charges(fed) == []


# --- one budget per site, one order per ledger


def test_invariant_12_a_second_run_goes_on_with_the_same_ledger_at_its_order(federation):
    fed = replan(federation(rounds=2), noise_multiplier=2.0)
    fed.strategy().start(fed.grid())
    first = LedgerReader(ledger_path(fed)).epsilon()
    order = LedgerReader(ledger_path(fed)).account.order

    again = replan(federation("second", rounds=1), noise_multiplier=8.0)
    generator, discriminator = again.networks()
    again.path.mkdir(parents=True)
    second = FedDPGAN(again.plan, generator, discriminator, folder=RunFolder(again.path), run="second")
    assert again.plan.site_plan(40).order != order  # by itself it would choose another
    second.start(fed.grid())
    ledger = LedgerReader(ledger_path(fed))
    assert {charge.run for charge in ledger.charges()} == {"test", "second"}
    assert ledger.account.order == order == second.sites["site-0"].plan.order
    assert first < ledger.epsilon()
    assert ledger.epsilon("second") < ledger.epsilon() < first + ledger.epsilon("second") + 1e-9
    assert second.sites["site-0"].epsilon == pytest.approx(ledger.epsilon("second"), rel=1e-9)


def test_invariant_12_a_second_run_finds_only_what_the_first_left(federation):
    fed = replan(federation(rounds=1), noise_multiplier=1.0, eps_max=8.0)
    fed.sites[0] = fed.site(0, eps_max=8.0)
    message, runs, trained = fed.request(), 0, True
    while trained and runs < 400:
        trained = ask(fed.sites[0], changed(message, run=f"run-{runs}")).status == "trained"
        runs += 1
    assert not trained and runs > 2
    assert LedgerReader(ledger_path(fed)).epsilon() <= 8.0


@pytest.mark.parametrize("step", [-1, 1])
def test_invariant_6_a_first_request_with_another_order_than_the_sites_own_is_refused(federation, step):
    fed = federation()
    message = fed.request()
    header, _ = wire.unpack(message, wire.Request)
    order = ORDERS[ORDERS.index(header.plan.order) + step]
    answer = ask(fed.sites[0], changed(message, plan=header.plan.model_copy(update={"order": order})))
    assert (answer.status, answer.rule) == ("refused", "order")
    assert not ledger_path(fed).exists()


def test_invariant_6_a_later_request_with_another_order_than_the_ledgers_is_refused(federation):
    fed = federation()
    message = fed.request()
    ask(fed.sites[0], message)
    header, _ = wire.unpack(message, wire.Request)
    plan = header.plan.model_copy(update={"order": header.plan.order + 1})
    answer = ask(fed.sites[0], changed(message, plan=plan, round=2))
    assert (answer.status, answer.rule) == ("refused", "order")
    assert len(charges(fed)) == 1


def archive(fed, declared_size=20, records=20):
    generator, discriminator = fed.networks()
    return Site(
        "site-0", Records(*fed.data(0, records)), policy=Policy(declared_size=declared_size), generator=generator,
        discriminator=discriminator, ledger=ledger_path(fed), learning_rate=1e-3, budget="archive", seed=0,
    )  # fmt: skip


def archive_request(fed, declared_size=20):
    message = fed.request()
    order = LedgerReader(ledger_path(fed)).account.order if ledger_path(fed).exists() else None
    return changed(message, run="archived", plan=fed.plan.site_plan(declared_size, order))


def test_invariant_12_a_second_budget_needs_a_declaration_and_its_declared_size(federation):
    fed = replan(federation(), noise_multiplier=3.0)
    ask(fed.sites[0], fed.request())
    assert ask(archive(fed), archive_request(fed)).status == "failed"  # nobody has declared it
    assert len(charges(fed)) == 1
    ledger = Ledger(ledger_path(fed))
    ledger.declare_disjoint(Declaration("archive", 20, "scans of 2001, other patients"))
    ledger.close()
    assert ask(archive(fed, 18), archive_request(fed, 18)).status == "failed"  # another size than declared
    assert len(charges(fed)) == 1
    assert ask(archive(fed), archive_request(fed)).status == "trained"
    ledger = LedgerReader(ledger_path(fed))
    assert [charge.budget for charge in ledger.charges()] == ["main", "archive"]
    assert ledger.epsilon(budget="archive") > ledger.epsilon(budget="main") > 0


def test_invariant_12_a_site_of_an_undeclared_budget_makes_no_ledger(federation):
    """Its terms would become those of the main budget, for ever."""
    fed = federation()
    fed.sites = {0: archive(fed)}
    answer = ask(fed.sites[0], archive_request(fed))
    assert answer.status in ("refused", "failed")
    assert not ledger_path(fed).exists()


def test_a_policy_of_other_terms_than_the_ledgers_does_not_train(federation):
    fed = federation()
    ask(fed.sites[0], fed.request())
    message = fed.request(round_number=2)
    assert ask(fed.site(0, eps_max=11.0), message).status == "failed"
    assert len(charges(fed)) == 1


# --- unit


def test_invariant_11_a_plan_of_another_unit_is_refused_by_name(federation):
    fed = federation()
    message = fed.request()
    header, _ = wire.unpack(message, wire.Request)
    answer = ask(fed.sites[0], changed(message, plan=header.plan.model_copy(update={"unit": "patient"})))
    assert (answer.status, answer.rule) == ("refused", "unit")
    assert charges(fed) == []


# --- anchor


class Swap:
    """Does something to site-1's ledger after given rounds."""

    def __init__(self, fed, **after):
        self.file, self.after = ledger_path(fed, 1), {int(key[1:]): what for key, what in after.items()}
        self.saved = self.file.with_suffix(".old")
        self.newest = self.file.with_suffix(".newest")

    def __call__(self, record):
        for step in self.after.get(record["round"], ()):
            getattr(self, step)()

    def save(self):
        shutil.copy(self.file, self.saved)

    def put_old(self):
        shutil.copy(self.file, self.newest)
        shutil.copy(self.saved, self.file)

    def delete(self):
        shutil.copy(self.file, self.newest)
        self.file.unlink()

    def put_newest(self):
        shutil.copy(self.newest, self.file)


@pytest.mark.parametrize("loss", ["put_old", "delete"])
def test_an_older_or_missing_ledger_is_refused_and_trains_again_when_the_newest_is_back(federation, loss):
    fed = federation(sites=3, rounds=4)
    swap = Swap(fed, r1=["save"], r2=[loss], r3=["put_newest"])
    seen = []

    def watch(record):
        if record["round"] == 3:
            seen.append((swap.file.exists(), len(charges(fed, 1)) if swap.file.exists() else 0))
        swap(record)

    fed.strategy(on_round=watch).start(fed.grid())
    found = [statuses(record) for record in rounds(fed)]
    assert [s["site-1"] for s in found] == [("trained", ""), ("trained", ""), ("refused", "anchor"), ("trained", "")]
    assert all(s[name] == ("trained", "") for s in found for name in ("site-0", "site-2"))
    assert seen == [(True, 1) if loss == "put_old" else (False, 0)]  # nothing charged to it, and none made anew
    assert [charge.round for charge in charges(fed, 1)] == [1, 2, 4]


def test_the_log_and_the_checkpoint_keep_the_newest_hash_of_each_site(federation):
    fed = federation(rounds=2)
    fed.strategy().start(fed.grid())
    _, meta = RunFolder(fed.path).load_checkpoint()
    for number in (0, 1):
        head = rounds(fed)[-1]["sites"][f"site-{number}"]["head"]
        assert head == meta["sites"][f"site-{number}"]["head"]
        with sqlite3.connect(ledger_path(fed, number)) as db:
            hashes = [h for (h,) in db.execute("SELECT hash FROM entries WHERE kind = 'charge' ORDER BY seq")]
        assert head == hashes[-1]
        assert rounds(fed)[0]["sites"][f"site-{number}"]["head"] == hashes[0]


class Stop(Exception):  # noqa: N818
    pass


def stopped_after(fed, last, **kwargs):
    def stop(record):
        if record["round"] == last:
            raise Stop

    with pytest.raises(Stop):
        fed.strategy(on_round=stop).start(fed.grid(), **kwargs)


def test_a_resumed_run_still_remembers_the_hashes(federation):
    fed = federation(rounds=3)
    stopped_after(fed, 1)
    saved = ledger_path(fed, 1).with_suffix(".old")
    shutil.copy(ledger_path(fed, 1), saved)
    stopped_after(fed, 2)
    shutil.copy(saved, ledger_path(fed, 1))
    fed.strategy().start(fed.grid())
    assert statuses(rounds(fed)[-1]) == {"site-0": ("trained", ""), "site-1": ("refused", "anchor")}


def test_a_run_remembers_the_hash_and_the_steps_of_a_site_that_missed_a_start(federation):
    fed = federation(rounds=3)
    stopped_after(fed, 1)
    saved = ledger_path(fed, 1)
    away = fed.sites.pop(1)
    stopped_after(fed, 2)  # site-1 is not there
    fed.sites[1] = away
    saved.unlink()
    strategy = fed.strategy()
    strategy.start(fed.grid())
    assert statuses(rounds(fed)[-1])["site-1"] == ("refused", "anchor")
    assert strategy.sites["site-1"].steps == 2


def test_a_new_run_of_an_edited_ledger_does_not_start(federation):
    fed = federation(rounds=2)
    fed.strategy().start(fed.grid())
    with sqlite3.connect(ledger_path(fed)) as db:
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {name}")
        db.execute("UPDATE entries SET payload = replace(payload, '\"count\":2', '\"count\":1') WHERE kind = 'charge'")
    db.close()
    with pytest.raises(LedgerError):
        fed.site(0)
    assert fed.site(1).name == "site-1"


# --- what the ledger says of C


@pytest.mark.parametrize("clipping", [{"rule": "epsilon_adaptive", "c_min": 0.2, "c_max": 2.0}, {"rule": "automatic"},
                                      {"rule": "fixed", "c": 0.6}])  # fmt: skip
def test_the_ledger_notes_c_of_each_rounds_first_step(federation, clipping):
    fed = replan(federation(rounds=3), clipping=clipping)
    strategy = fed.strategy()
    strategy.start(fed.grid())
    plan = strategy.sites["site-0"].plan
    assert [c.clipping_norm for c in charges(fed)] == [
        plan.clipping.norm(plan.epsilon_after(step) / plan.eps_max) for step in (0, 2, 4)
    ]


def test_quantile_c_goes_from_round_to_round_through_the_ledger_alone(federation, monkeypatch):
    fed = replan(federation(sites=1, rounds=4), clipping={"rule": "quantile", "c_first": 0.5, "count_noise": 4.0})
    real, returned = site_module.local_update, []
    monkeypatch.setattr(site_module, "local_update", lambda *a, **k: returned.append(real(*a, **k)) or returned[-1])
    for last in (1, 2, 3):
        stopped_after(fed, last)
        fed.sites = {0: fed.site(0)}  # the old process is gone
    fed.strategy().start(fed.grid())
    noted = [c.clipping_norm for c in charges(fed)]
    assert noted[0] == 0.5
    assert noted[1:] == returned[:-1] and len(set(noted)) == 4
    plan = fed.plan.site_plan(40)
    assert {c.event.noise_multiplier for c in charges(fed)} == {plan.noise_multiplier}


# --- who joins, what leaves


def test_sites_of_another_unit_do_not_join_and_the_log_says_so(federation):
    fed = replan(federation(quorum=1), unit="patient")
    with pytest.raises(FederationError, match=r"site-\d protects images, the run patients"):
        fed.strategy().start(fed.grid())


def test_data_of_another_unit_than_the_policys_are_refused(federation):
    fed = federation()
    images, labels = fed.data(0)
    with pytest.raises(DataError, match="policy protects patients, the data give images"):
        fed.site(0, unit="patient")
    with pytest.raises(DataError, match="policy protects images, the data give patients"):
        fed.site(0, data=(images, labels, [str(n) for n in range(40)]))


@pytest.mark.parametrize(("message", "beside"), [(wire.Hello, set()), (wire.Answer, {"tensors"})])
def test_invariant_1_every_field_that_leaves_is_listed_with_a_reason_and_no_other(message, beside):
    listed = wire.LEAVES[message.__name__]
    assert set(listed) == set(message.model_fields) | beside
    assert all(why.split(":")[0] in ("public", "charged") and len(why) > 15 for why in listed.values())
    assert set(wire.LEAVES) == {"Hello", "Answer"}


def test_invariant_1_tensors_leave_with_a_trained_answer_alone(federation):
    fed = federation()
    assert wire.unpack(fed.sites[0].hello(fed.request()), wire.Hello)[1] == b""
    message = changed(fed.request(), site="other")
    header, tensors = wire.unpack(fed.sites[0].train(message), wire.Answer)
    assert (header.status, header.rule, header.count, tensors) == ("refused", "wire", None, b"")
