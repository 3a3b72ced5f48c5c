"""A site charges before it answers, answers a repetition with the same bytes, and says nothing of its records."""

import json
import sqlite3

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from safetensors.torch import load, save
from torch import nn

from fl_dpgan.errors import ConfigError, DataError
from fl_dpgan.federation import site as site_module
from fl_dpgan.federation import wire
from fl_dpgan.federation.client import Pack
from fl_dpgan.privacy.ledger import Ledger, LedgerReader


def answer(message):
    return wire.unpack(message, wire.Answer)


def ledger_path(federation, number=0):
    return federation.path / "ledgers" / f"site-{number}.sqlite"


def events(federation, number=0):
    path = ledger_path(federation, number)
    return LedgerReader(path).charges() if path.exists() else []


def test_a_trained_answer_holds_the_discriminator_and_one_event_per_round(federation):
    fed = federation()
    header, tensors = answer(Pack([fed.sites[0]]).train(fed.request()))
    assert header.status == "trained"
    assert {k.removeprefix("discriminator.") for k in load(tensors)} == set(fed.networks()[1].state_dict())
    assert [row.event.count for row in events(fed)] == [2]


def test_invariant_2_charge_is_durable_before_training_and_a_crash_after_it_stays_charged(federation, monkeypatch):
    fed = federation()

    def crash(*args, **kwargs):
        assert len(events(fed)) == 1  # read through another connection: already on disk
        raise RuntimeError("killed between charge and release")

    monkeypatch.setattr(site_module, "local_update", crash)
    header, tensors = answer(Pack([fed.sites[0]]).train(fed.request()))
    assert header.status == "failed"
    assert tensors == b""
    assert "killed" not in header.reason
    assert len(events(fed)) == 1


def test_a_ledger_on_a_full_disk_is_one_line_in_the_sites_log_and_the_server_is_told_nothing_of_it(
    federation, monkeypatch, caplog
):
    fed = federation()
    monkeypatch.setattr(Ledger, "_append", lambda *args: (_ for _ in ()).throw(sqlite3.OperationalError("disk full")))
    header, tensors = answer(Pack([fed.sites[0]]).train(fed.request()))
    assert (header.status, tensors) == ("failed", b"") and "disk" not in header.reason
    (record,) = caplog.records
    assert "disk full" in record.getMessage() and record.exc_info is None and "\n" not in record.getMessage()


def test_invariant_2_a_repeated_request_gets_the_stored_bytes_and_no_second_charge(federation):
    fed = federation()
    request = fed.request()
    first = answer(Pack([fed.sites[0]]).train(request))
    again = answer(Pack([fed.site(0)]).train(request))  # a new process: nothing but the ledger is shared
    assert again == first
    assert len(events(fed)) == 1


def test_invariant_2_a_request_repeated_after_a_later_round_is_refused_and_not_drawn_again(federation):
    fed = federation()
    pack, first, second = Pack([fed.sites[0]]), fed.request(0, 1), fed.request(0, 2)
    answers = [answer(pack.train(request)) for request in (first, second)]
    late, nothing = answer(pack.train(first))  # the bytes of the first answer are gone
    assert (late.status, late.rule, nothing) == ("refused", "repeated", b"")
    assert answer(pack.train(second)) == answers[1]
    assert len(events(fed)) == 2


def test_a_request_repeated_with_other_content_is_refused(federation):
    fed = federation()
    request = fed.request()
    Pack([fed.sites[0]]).train(request)
    header, tensors = wire.unpack(request, wire.Request)
    changed = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in load(tensors).items()}
    request.content = wire.pack(header, save(changed))
    header, _ = answer(Pack([fed.sites[0]]).train(request))
    assert header.status == "refused"
    assert len(events(fed)) == 1


def test_a_request_lost_after_its_charge_is_charged_again(federation, monkeypatch):
    fed = federation()
    request = fed.request()
    with monkeypatch.context() as patch:
        patch.setattr(site_module, "local_update", lambda *a, **k: 1 / 0)
        Pack([fed.sites[0]]).train(request)
    header, _ = answer(Pack([fed.sites[0]]).train(request))
    assert header.status == "trained"
    assert len(events(fed)) == 2


def test_a_site_that_has_spent_its_budget_withdraws_and_says_how_many_steps_fit(federation):
    fed = federation()
    site = fed.sites[0] = fed.site(0, eps_max=0.5)
    header, tensors = answer(Pack([site]).train(fed.request()))
    assert (header.status, tensors) == ("withdrawn", b"")
    assert "0 would still fit" in header.reason
    assert events(fed) == []


def test_invariant_7_a_record_that_overflows_changes_neither_whether_nor_how_a_site_answers(federation):
    outcomes = []
    for name, value in (("plain", 0.5), ("huge", 3e38)):
        fed = federation(name)
        images, labels = fed.data(0)
        images[0] = value
        header, tensors = answer(Pack([fed.site(0, data=(images, labels))]).train(fed.request()))
        header = header.model_copy(update={"head": ""})  # a hash over the time too
        outcomes.append((header, {k: (v.shape, bool(v.isfinite().all())) for k, v in load(tensors).items()}))
    assert outcomes[0] == outcomes[1]
    assert all(finite for _, finite in outcomes[0][1].values())


def test_invariant_1_an_answer_has_the_listed_fields_and_no_other(federation):
    fed = federation()
    reply = Pack([fed.sites[0]]).train(fed.request())
    (name,) = reply.content.keys()
    record = reply.content.config_records[name]
    assert set(record) == {"headers", "tensors"}
    assert set(json.loads(record["headers"][0])) == set(wire.LEAVES["Answer"]) - {"tensors"}
    hello = json.loads(Pack([fed.sites[0]]).hello(fed.request()).content.config_records[name]["headers"][0])
    assert hello == {
        "site": "site-0",
        "declared_size": 40,
        "unit": "image",
        "order": LedgerReader(ledger_path(fed)).account.order,
    }
    assert set(hello) == set(wire.LEAVES["Hello"])


def test_invariant_5_the_answer_to_a_hello_shows_the_declared_size_whatever_the_data_hold(federation):
    fed = federation()
    shown = [fed.site(0, data=fed.data(0, n)).introduction() for n in (38, 40, 57)]
    assert shown[0] == shown[1] == shown[2]


@pytest.mark.parametrize("field", ["noise_multiplier", "batch_size", "order", "delta", "declared_size", "d_steps"])
@pytest.mark.parametrize("value", [0, -1, 1e300, "NaN", "x", None])
def test_invariant_4_a_plan_out_of_range_is_refused_uncharged(federation, field, value):
    fed = federation()
    request = fed.request()
    header, tensors = wire.unpack(request, wire.Request)
    raw = json.loads(header.model_dump_json())
    raw["plan"][field] = value
    request.content = RecordDict({"fl_dpgan": ConfigRecord({"header": json.dumps(raw), "tensors": tensors})})
    answered, _ = answer(Pack([fed.sites[0]]).train(request))
    assert answered.status == "refused"
    assert events(fed) == []


@pytest.mark.parametrize("spoil", ["nan", "shape", "missing", "extra", "rubbish", "pickle"])
def test_invariant_9_weights_that_do_not_fit_are_refused_uncharged(federation, spoil):
    fed = federation()
    request = fed.request()
    header, tensors = wire.unpack(request, wire.Request)
    state = load(tensors)
    key = "discriminator.head.bias"
    if spoil == "nan":
        state[key] = state[key] * float("nan")
    elif spoil == "shape":
        state[key] = torch.zeros(3)
    elif spoil == "missing":
        del state[key]
    elif spoil == "extra":
        state["more"] = torch.zeros(1)
    body = {"rubbish": b"\x00\xff" * 40, "pickle": b"\x80\x04N."}.get(spoil) or save(state)
    request.content = wire.pack(header, body)
    answered, _ = answer(Pack([fed.sites[0]]).train(request))
    assert answered.status == "refused"
    assert events(fed) == []


@pytest.mark.parametrize(
    "content", [RecordDict(), RecordDict({"fl_dpgan": ConfigRecord({"header": 3, "tensors": b""})})]
)
def test_a_message_of_another_form_is_refused(federation, content):
    fed = federation()
    request = fed.request()
    request.content = content
    assert answer(Pack([fed.sites[0]]).train(request))[0].status == "refused"


def test_data_that_fall_short_of_the_declared_size_do_not_join(federation):
    with pytest.raises(DataError, match="20 images, too few for the declared size 40"):
        federation().site(0, data=(torch.zeros(20, 1, 28, 28), torch.zeros(20, dtype=torch.int64)))


def test_images_that_are_not_finite_do_not_join(federation):
    fed = federation()
    images, labels = fed.data(0)
    images[3, 0, 0, 0] = float("nan")
    with pytest.raises(DataError, match="not finite"):
        fed.site(0, data=(images, labels))


class BatchNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 4, 2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2 * 13 * 13, 1))

    def forward(self, images, labels):
        return self.layers(images).squeeze(1)


def test_a_discriminator_with_batch_norm_is_refused(federation, monkeypatch):
    fed = federation()
    generator, _ = fed.networks()
    monkeypatch.setattr(fed, "networks", lambda: (generator, BatchNormed()))
    with pytest.raises(ConfigError, match="depends on another"):
        fed.site(0)


def test_invariant_8_a_site_without_a_seed_draws_from_the_operating_system(federation):
    bodies = []
    for name in ("a", "b"):
        fed = federation(name)
        fed.sites[0]._seed = None
        bodies.append(answer(Pack([fed.sites[0]]).train(fed.request()))[1])
    assert bodies[0] != bodies[1]


class Remembering(nn.Module):
    """Keeps the last image it saw in a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 4, 2, 1), nn.Flatten(), nn.Linear(2 * 14 * 14, 1))
        self.register_buffer("seen", torch.zeros(1, 28, 28))

    def forward(self, images, labels):
        if self.training and len(images):
            self.seen.copy_(images[-1])
        return self.layers(images).squeeze(1)


class Scaled(Remembering):
    """Has a buffer that never changes."""

    def forward(self, images, labels):
        return self.layers(images).squeeze(1)


def test_invariant_1_a_discriminator_that_keeps_records_in_a_buffer_is_refused(federation, monkeypatch):
    fed = federation()
    generator, _ = fed.networks()
    monkeypatch.setattr(fed, "networks", lambda: (generator, Remembering()))
    with pytest.raises(ConfigError, match="buffer seen"):
        fed.site(0)


def test_invariant_1_buffers_do_not_leave_with_the_parameters(federation, monkeypatch):
    fed = federation()
    generator, discriminator = fed.networks()[0], Scaled()
    monkeypatch.setattr(fed, "networks", lambda: (generator, discriminator))
    fed.sites = {0: fed.site(0), 1: fed.site(1)}
    header, tensors = answer(Pack([fed.sites[0]]).train(fed.request()))
    assert header.status == "trained"
    assert set(load(tensors)) == {name for name, _ in discriminator.named_parameters()}


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (torch.zeros(40, 1, 32, 32), r"images of \(1, 32, 32\) .* gives \(1, 28, 28\)"),
        (torch.zeros(40, 3, 28, 28), r"images of \(3, 28, 28\) .* gives \(1, 28, 28\)"),
        (torch.zeros(40, 1, 28, 28, dtype=torch.uint8, device="meta"), "images on meta, networks on cpu"),
    ],
)
def test_images_of_another_shape_or_elsewhere_than_the_networks_do_not_join(federation, images, reason):
    with pytest.raises(DataError, match=f"site site-0: {reason}"):
        federation().site(0, data=(images, torch.zeros(40, dtype=torch.int64)))
