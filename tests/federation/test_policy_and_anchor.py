"""A site's policy and its ledger's newest hash win over the server; a refusal is named, uncharged, hurts no other."""

import json
import logging
import math
import shutil
import sqlite3
from contextlib import closing

import pytest
import torch
from flwr.app import Context, MessageType, RecordDict
from flwr.clientapp import ClientApp
from pydantic import ValidationError
from safetensors.torch import save

from fl_dpgan.config import Plan
from fl_dpgan.errors import DataError, FederationError, LedgerError
from fl_dpgan.federation import FedDPGAN, Policy, Records, Site, register, wire
from fl_dpgan.federation import site as site_module
from fl_dpgan.federation.client import Pack
from fl_dpgan.privacy.accountant import ORDERS, Event
from fl_dpgan.privacy.entries import Charge, Declaration
from fl_dpgan.privacy.ledger import Ledger, LedgerReader
from fl_dpgan.privacy.verify import verify
from fl_dpgan.runs import RunFolder
from fl_dpgan.training.models import Models
from tests.conftest import grid_sent


def ledger_path(fed, number=0):
    return fed.path / "ledgers" / f"site-{number}.sqlite"


def charges(fed, number=0):
    return LedgerReader(ledger_path(fed, number)).charges()


def renewed(fed, number=0, **terms):
    """The site with another policy, and the ledger that goes with it in place of its own."""
    ledger_path(fed, number).unlink()
    return fed.site(number, **terms)


def bare(fed, number=0, *, name=None, data=None, **terms):
    """A site as its own people build it: nobody makes a ledger first."""
    return Site(
        name or f"site-{number}", Records(*(data or fed.data(number))),
        policy=Policy.model_validate({"declared_size": 40, **terms}), models=Models(*fed.networks()),
        ledger=ledger_path(fed, number), learning_rate=1e-3, seed=0,
    )  # fmt: skip


def replan(fed, **privacy):
    raw = fed.plan.model_dump()
    fed.plan = Plan.model_validate({**raw, "privacy": {**raw["privacy"], **privacy}})
    return fed


def rounds(fed):
    return list(RunFolder(fed.path).rounds())


def statuses(record):
    return {name: (site["status"], site.get("rule", "")) for name, site in record["sites"].items()}


def ask(site, message):
    return wire.unpack(Pack([site]).train(message), wire.Answer)[0]


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
    fed.sites[1] = renewed(fed, 1, **terms)
    strategy = fed.strategy()
    strategy.start(fed.grid())
    for record in rounds(fed):
        assert statuses(record) == {"site-0": ("trained", ""), "site-1": ("refused", rule), "site-2": ("trained", "")}
        assert record["sites"]["site-1"]["epsilon"] == 0
    assert verify(ledger_path(fed, 1)).entries == 1  # the account alone
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
    site = renewed(fed, eps_max=10.0, eps_per_run=2.0, order=fed.plan.site_plan(40).order)
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
    site = fed.sites[0] = renewed(fed, eps_max=10.0, eps_per_run=2.0, order=fed.plan.site_plan(40).order)
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
    fed.sites[0] = renewed(fed, eps_max=8.0)
    message, answers = fed.request(), []
    while len(answers) < 400 and all(answer.status == "trained" for answer in answers):
        answers.append(ask(fed.sites[0], changed(message, run=f"run-{len(answers)}")))
    assert (answers[-1].status, answers[-1].rule) == ("withdrawn", "eps_max")
    assert len(answers) > 2
    assert LedgerReader(ledger_path(fed)).epsilon() <= 8.0


@pytest.mark.parametrize("step", [-1, 1])
def test_invariant_6_a_first_request_with_another_order_than_the_sites_own_is_refused(federation, step):
    fed = federation()
    message = fed.request()
    header, _ = wire.unpack(message, wire.Request)
    order = ORDERS[ORDERS.index(header.plan.order) + step]
    answer = ask(fed.sites[0], changed(message, plan=header.plan.model_copy(update={"order": order})))
    assert (answer.status, answer.rule) == ("refused", "order")
    assert charges(fed) == []
    assert LedgerReader(ledger_path(fed)).account.order == header.plan.order


def test_invariant_6_a_later_request_with_another_order_than_the_ledgers_is_refused(federation):
    fed = federation()
    message = fed.request()
    ask(fed.sites[0], message)
    header, _ = wire.unpack(message, wire.Request)
    plan = header.plan.model_copy(update={"order": header.plan.order + 1})
    answer = ask(fed.sites[0], changed(message, plan=plan, round=2))
    assert (answer.status, answer.rule) == ("refused", "order")
    assert len(charges(fed)) == 1


@pytest.mark.parametrize("order", [None, 5.0, 80.0])
def test_invariant_6_the_order_is_the_sites_own_and_the_plan_follows_it(federation, order):
    fed = federation(sites=1, rounds=1)
    site = fed.sites[0] = renewed(fed, **({} if order is None else {"order": order}))
    expected = Policy(declared_size=40).ledger_order if order is None else order
    assert LedgerReader(ledger_path(fed)).account.order == expected
    asked, _ = wire.unpack(fed.request(), wire.Request)
    assert asked.plan.order == expected
    assert wire.unpack(Pack([site]).hello(fed.request()), wire.Hello)[0].order == expected
    fed.strategy().start(fed.grid())
    assert statuses(rounds(fed)[0])["site-0"] == ("trained", "")
    assert LedgerReader(ledger_path(fed)).account.order == expected


@pytest.mark.parametrize("order", [None, 1.0, 2.5, 64.0, 1024.0, math.nan])
def test_invariant_6_an_order_that_is_not_the_accountants_joins_no_run_and_is_no_plans(federation, order):
    hello = {"site": "a", "declared_size": 40, "unit": "image", "order": 3.0}
    assert wire.Hello.model_validate(hello).order == 3.0
    with pytest.raises(ValidationError, match="order"):
        wire.Hello.model_validate({**hello, "order": order})
    fed = federation()
    message = fed.request()
    header, tensors = wire.unpack(message, wire.Request)
    raw = header.model_dump(mode="json")
    raw["plan"]["order"] = order
    message.content = wire.pack_parts([(json.dumps(raw), tensors)])
    answer = ask(fed.sites[0], grid_sent(message))
    assert (answer.status, answer.rule) == ("refused", "wire")
    assert charges(fed) == []


def archive(fed, declared_size=20, records=20):
    return Site(
        "site-0", Records(*fed.data(0, records)), policy=Policy(declared_size=declared_size),
        models=Models(*fed.networks()), ledger=ledger_path(fed), learning_rate=1e-3, budget="archive", seed=0,
    )  # fmt: skip


def archive_request(fed, declared_size=20):
    message = fed.request()
    order = LedgerReader(ledger_path(fed)).account.order
    return changed(message, run="archived", plan=fed.plan.site_plan(declared_size, order))


def test_invariant_12_a_second_budget_needs_a_declaration_and_its_declared_size(federation):
    fed = replan(federation(), noise_multiplier=3.0)
    ask(fed.sites[0], fed.request())
    with pytest.raises(LedgerError, match="declare a disjoint budget"):  # nobody has declared it
        archive(fed)
    assert len(charges(fed)) == 1
    ledger = Ledger(ledger_path(fed))
    ledger.declare_disjoint(Declaration("archive", 20, "scans of 2001, other patients"))
    ledger.close()
    with pytest.raises(LedgerError, match="other terms"):  # another size than declared
        archive(fed, 18)
    assert len(charges(fed)) == 1
    assert ask(archive(fed), archive_request(fed)).status == "trained"
    ledger = LedgerReader(ledger_path(fed))
    assert [charge.budget for charge in ledger.charges()] == ["main", "archive"]
    assert ledger.epsilon(budget="archive") > ledger.epsilon(budget="main") > 0


def test_invariant_12_a_site_of_an_undeclared_budget_makes_no_ledger(federation):
    """Its terms would become those of the main budget, for ever."""
    fed = federation()
    ledger_path(fed).unlink()
    with pytest.raises(LedgerError, match="no ledger at"):
        archive(fed)
    assert list(ledger_path(fed).parent.glob("site-0*")) == []


def test_invariant_12_a_site_makes_no_ledger(federation):
    fed = federation()
    ledger_path(fed).unlink()
    with pytest.raises(LedgerError, match="no ledger at"):
        bare(fed)
    assert list(ledger_path(fed).parent.glob("site-0*")) == []
    fed.site(0)  # it is made on its own
    assert bare(fed).name == "site-0"


@pytest.mark.parametrize(
    "other", [{"eps_max": 11.0}, {"eps_max": 9.0}, {"delta": 5e-6}, {"declared_size": 39}, {"unit": "patient"},
              {"name": "site-1"}]
)  # fmt: skip
def test_a_policy_of_other_terms_than_the_ledgers_does_not_train(federation, other):
    fed = federation()
    ask(fed.sites[0], fed.request())
    data = (*fed.data(0), [str(n) for n in range(40)]) if "unit" in other else None
    with pytest.raises(LedgerError, match="created for other terms than the policy's"):
        bare(fed, data=data, **other)
    assert len(charges(fed)) == 1


def test_a_ledger_of_other_terms_that_is_put_in_later_is_not_charged(federation):
    fed = federation()
    message = fed.request()
    renewed(fed, eps_max=11.0)
    header, tensors = wire.unpack(Pack([fed.sites[0]]).train(message), wire.Answer)
    assert (header.status, header.head, tensors) == ("failed", "", b"")
    assert charges(fed) == []


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


def test_a_ledger_that_is_deleted_is_never_made_anew_whether_or_not_the_server_remembers_it(federation):
    fed = federation()
    first = ask(fed.sites[0], fed.request())
    again = fed.request(round_number=2)
    ledger_path(fed).unlink()
    for anchor, expected in (("", ("failed", "")), (first.head, ("refused", "anchor"))):
        header, tensors = wire.unpack(Pack([fed.sites[0]]).train(changed(again, anchor=anchor)), wire.Answer)
        assert (header.status, header.rule, header.head, tensors) == (*expected, "", b"")
        assert list(ledger_path(fed).parent.glob("site-0*")) == []


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
        triggers = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            db.execute(f"DROP TRIGGER {name}")
        db.execute("UPDATE entries SET payload = replace(payload, '\"count\":2', '\"count\":1') WHERE kind = 'charge'")
        for _, sql in triggers:
            db.execute(sql)
    db.close()
    with pytest.raises(LedgerError, match=r"entry 2: .*own hash"):
        bare(fed)
    assert bare(fed, 1).name == "site-1"


IGNORE = "BEFORE INSERT ON entries WHEN NEW.kind = 'charge' BEGIN SELECT RAISE(IGNORE); END"


def test_invariant_2_a_trigger_that_swallows_charges_stops_every_release(federation):
    fed = federation()
    message = fed.request()
    with closing(sqlite3.connect(ledger_path(fed))) as db:
        db.execute(f"CREATE TRIGGER entries_more {IGNORE}")
    with closing(Ledger(ledger_path(fed))) as ledger, pytest.raises(LedgerError, match="did not keep a charge"):
        ledger.charge(Charge(Event(0.1, 1.5, 1), 1.0, "test", 1, "q1", 6.0, "plan"))
    header, tensors = wire.unpack(Pack([fed.sites[0]]).train(message), wire.Answer)
    assert (header.status, header.head, tensors) == ("failed", "", b"")
    assert charges(fed) == []
    with pytest.raises(LedgerError, match="triggers that no ledger has: entries_more"):
        bare(fed)


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
        renewed(fed, unit="patient")
    ledger_path(fed).unlink()
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
    assert wire.unpack(Pack([fed.sites[0]]).hello(fed.request()), wire.Hello)[1] == b""
    message = changed(fed.request(), site="other")
    header, tensors = wire.unpack(Pack([fed.sites[0]]).train(message), wire.Answer)
    assert (header.status, header.rule, header.count, tensors) == ("refused", "wire", None, b"")


def test_invariant_1_a_reason_is_printable_whatever_the_request_holds(federation):
    fed = federation()
    answer = ask(fed.sites[0], changed(fed.request(), site="\x1b[31m\u202esite\n\x00"))
    assert (answer.status, answer.rule) == ("refused", "wire")
    assert answer.reason.isprintable() and "[31m" in answer.reason
    for reason in ("a\nb", "\x1b[2J", "a\x00", "\x9b2J", "a\x7f"):
        with pytest.raises(ValidationError, match="reason"):
            wire.Answer(site="site-0", round=1, status="failed", reason=reason)


CONSTANT = "the site cannot take part; its own log says why"


@pytest.mark.parametrize("kind", [MessageType.QUERY, MessageType.TRAIN, MessageType.EVALUATE])
@pytest.mark.parametrize("fault", ["too few records", "no ledger", "the answer"])
def test_invariant_1_what_fails_at_a_site_is_told_to_its_own_log_alone(federation, monkeypatch, caplog, kind, fault):
    fed = federation(sites=1)
    request = fed.request()
    request.metadata.message_type = kind
    if fault == "no ledger":
        ledger_path(fed).unlink()
    method = {MessageType.QUERY: "hello", MessageType.TRAIN: "train", MessageType.EVALUATE: "evaluate"}[kind]

    def breaks(pack, message):
        raise RuntimeError("record 31 of 40")

    if fault == "the answer":
        monkeypatch.setattr(Pack, method, breaks)
    app = ClientApp()
    register(app, lambda context: bare(fed, data=fed.data(0, 31) if fault == "too few records" else None))
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    with caplog.at_level(logging.ERROR, "fl_dpgan.federation.client"):
        reply = app(request, context)
    assert reply.has_error() and not reply.has_content()
    assert (reply.error.code, reply.error.reason) == (2, CONSTANT)
    said = {"too few records": "31 images, too few", "no ledger": "no ledger at", "the answer": "record 31 of 40"}
    assert said[fault] in caplog.text  # the site's own people learn why


def test_a_site_that_is_well_answers_through_the_app_as_by_itself(federation):
    fed = federation(sites=1)
    app = ClientApp()
    register(app, lambda context: fed.sites[0])
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    request = fed.request()
    assert wire.unpack(app(request, context), wire.Answer)[0].status == "trained"
    request.metadata.message_type = MessageType.QUERY
    assert wire.unpack(app(request, context), wire.Hello)[0].site == "site-0"


# --- what the server makes of an answer that no honest site gives


def answering(fed, number, spoil):
    """The federation's grid; what site `number` trains is spoilt on its way."""
    grid = fed.grid()
    honest = grid.handlers[number + 10]

    def handle(message):
        reply = honest(message)
        if message.metadata.message_type == MessageType.TRAIN:
            header, tensors = wire.unpack(reply, wire.Answer)
            state = wire.read_parameters(tensors, fed.networks()[1])
            reply.content = wire.pack(header, save({name: spoil(name, t) for name, t in state.items()}))
        return reply

    grid.handlers[number + 10] = handle
    return grid


def finite(strategy):
    return all(t.isfinite().all() for module in strategy._modules.values() for t in module.state_dict().values())


@pytest.mark.parametrize("value", [3e38, -3e38, 1e30, math.nan, math.inf])
def test_invariant_7_a_site_that_answers_huge_weights_is_left_out_and_the_run_goes_on(federation, value):
    fed = federation(sites=3, rounds=2)
    strategy = fed.strategy()
    strategy.start(answering(fed, 1, lambda name, tensor: torch.full_like(tensor, value)))
    for record in rounds(fed):
        assert {name: site["status"] for name, site in record["sites"].items()} == {
            "site-0": "trained", "site-1": "left out", "site-2": "trained"
        }  # fmt: skip
        assert math.isfinite(record["g_loss"])
    assert strategy.sites["site-1"].steps == 4  # it may have charged them
    assert finite(strategy)

    without = federation("without", sites=3, rounds=2)  # the others' average is what it is without that site
    del without.sites[1]
    alone = without.strategy()
    alone.start(without.grid())
    for name, tensor in alone.discriminator.state_dict().items():
        assert torch.equal(tensor, strategy.discriminator.state_dict()[name])


@pytest.mark.parametrize(("factor", "status"), [(0.999, "trained"), (1.001, "left out")])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_weight_may_move_by_a_hundred_learning_rates_a_step_and_no_more(federation, factor, status, sign):
    fed = federation(rounds=1)
    most = 100 * fed.plan.training.d_steps * fed.plan.training.d_learning_rate
    before = dict(fed.networks()[1].named_parameters())
    last = list(before)[-1]

    def spoil(name, tensor):
        return before[name].detach() + sign * factor * most if name == last else tensor

    fed.strategy().start(answering(fed, 1, spoil))
    site = rounds(fed)[0]["sites"]["site-1"]
    assert site["status"] == status
    assert ("moved by" in site["reason"]) == (status == "left out")


@pytest.mark.parametrize("module", ["discriminator", "generator", "ema"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_invariant_7_networks_that_are_no_longer_finite_end_the_run_and_the_old_checkpoint_stays(
    federation, module, value
):
    fed = federation(rounds=3)
    strategy = fed.strategy()
    update, done = strategy._trainer.update, []

    def poison(*args, **kwargs):
        loss = update(*args, **kwargs)
        done.append(loss)
        if len(done) == 2:
            with torch.no_grad():
                next(strategy._modules[module].parameters()).view(-1)[0] = value
        return loss

    strategy._trainer.update = poison
    kept = []
    strategy._on_round = lambda record: kept.append(RunFolder(fed.path).load_checkpoint())
    with pytest.raises(FederationError, match=r"round 2: .*no longer finite; the checkpoint of round 1 is kept"):
        strategy.start(fed.grid())
    tensors, meta = RunFolder(fed.path).load_checkpoint()
    assert len(kept) == 1 and meta == kept[0][1] and meta["round"] == 1
    assert all(torch.equal(tensor, kept[0][0][name]) for name, tensor in tensors.items())
    assert [record["round"] for record in rounds(fed)] == [1]
