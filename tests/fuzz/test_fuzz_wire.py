"""Whatever comes over the network or the guard's socket is read or is a typed error, on both sides."""

import json
import logging
import socket
import struct
import threading
from contextlib import suppress
from random import Random

import pytest
from conftest import grid_sent
from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from mangle import VALUES, accepted, changed, changed_json, changed_safetensors, hypotheses, mangled, survey

from fl_dpgan.errors import WireError
from fl_dpgan.federation import frames, relay, wire
from fl_dpgan.federation.envelope import pack_parts, unpack_parts
from fl_dpgan.federation.exchange import Exchange, SiteRecord
from fl_dpgan.federation.guard import Guard
from fl_dpgan.federation.roster import Roster

QUESTION = wire.Question(classes=("healthy", "ill"), fingerprint="a" * 64)
ANSWER = {
    "site": "site-0", "round": 1, "status": "trained", "rule": "", "reason": "", "head": "b" * 64, "count": 1.5,
}  # fmt: skip


@pytest.fixture
def request_of(federation):
    """The strategy's own request to a site: the federation, the header as JSON has it, and the tensors."""
    fed = federation(sites=1)
    header, tensors = wire.unpack(fed.request(), wire.Request)
    return fed, json.loads(header.model_dump_json()), tensors


def headers(request):
    """A valid header of each kind."""
    hello = {"site": "site-0", "declared_size": 40, "unit": "image", "order": 8.0}
    return {
        wire.Request: request, wire.Answer: ANSWER, wire.Hello: hello,
        wire.Question: json.loads(QUESTION.model_dump_json()),
    }  # fmt: skip


def text(data: bytes) -> str:
    """Bytes as the text that a frame's JSON could make of them."""
    return data.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", [wire.Request, wire.Answer, wire.Hello, wire.Question])
def test_a_malformed_header_is_read_or_refused(request_of, kind, thorough):
    valid = headers(request_of[1])[kind]
    wire.parse(json.dumps(valid), kind)
    tally = survey(
        lambda header: wire.parse(header, kind), lambda r: _surrogates(r, text(changed_json(r, valid))), thorough
    )
    assert tally["read"] and set(tally) == {"read", "WireError"}


def _surrogates(random: Random, header: str) -> str:
    at = random.randrange(len(header) + 1)
    return header[:at] + random.choice(["\ud800", "\udfff\ud800"]) + header[at:] if random.random() < 0.03 else header


def test_a_request_with_any_json_in_place_of_a_field_is_read_or_refused(request_of, thorough):
    valid = request_of[1]
    places = [(valid, key) for key in valid] + [(valid["plan"], key) for key in valid["plan"]]
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    )

    @hypotheses(thorough)
    @given(st.sampled_from(range(len(places))), json_values)
    def check(place, value):
        holder, key = places[place]
        kept = holder[key]
        holder[key] = value
        try:
            wire.parse(json.dumps(valid), wire.Request)
        except WireError as error:
            accepted(error)
        finally:
            holder[key] = kept

    check()


def test_malformed_tensors_are_loaded_or_refused_and_the_networks_are_as_before(request_of, thorough):
    fed, _, tensors = request_of
    models = fed.sites[0].models
    modules = {"discriminator": models.discriminator, "generator": models.generator}
    wire.restore(tensors, **modules)
    before = wire.dump(**modules)

    def parse(body):
        try:
            wire.restore(body, **modules)
        except WireError:
            assert wire.dump(**modules) == before
            raise
        wire.restore(before, **modules)

    answer = wire.dump_parameters(models.discriminator)
    tally = survey(parse, lambda random: changed_safetensors(random, [tensors, tensors, answer]), thorough)
    assert tally["read"] and set(tally) == {"read", "WireError"}


def test_a_malformed_answers_tensors_are_read_or_refused(request_of, thorough):
    discriminator = request_of[0].sites[0].models.discriminator
    answer = wire.dump_parameters(discriminator)
    tally = survey(
        lambda body: wire.read_parameters(body, discriminator), lambda r: changed_safetensors(r, [answer]), thorough
    )
    assert tally["read"] and set(tally) == {"read", "WireError"}


def test_a_message_of_any_form_is_unpacked_or_refused(request_of, thorough):
    header = json.dumps(request_of[1])
    values = [
        header,
        b"tensors",
        1,
        2.5,
        True,
        [header],
        [b"x"],
        [b"x", b"y"],
        [1],
        [0.5],
        [True],
        ["a", "b"],
        "",
        b"",
        [],
    ]

    def make(random):
        record = {"headers": [header] * random.choice([1, 1, 2]), "tensors": [b"x"] * random.choice([1, 1, 2, 3])}
        for key in random.choice([["headers"], ["tensors"], ["headers", "tensors"], ["more"], []]):
            record[key] = random.choice(values)
        if random.random() < 0.1:
            record.pop(random.choice(list(record)))
        name = random.choice(["fl_dpgan", "fl_dpgan", "fl_dpgan", "", "other"])
        kind = ConfigRecord(record) if random.random() < 0.95 else MetricRecord({"headers": 1.0})
        return Message(RecordDict({name: kind}), dst_node_id=1, message_type=MessageType.TRAIN)

    tally = survey(lambda message: unpack_parts(message)[0], make, thorough)  # a message has a part at least
    assert tally["read"] and set(tally) == {"read", "WireError"}


# --- frames


def frame(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">IQ", len(header), len(body)) + header + body


def sending(connection: socket.socket, raw: bytes) -> threading.Thread:
    """Send from a thread, for a long frame does not fit into a socket's buffer; who reads may hang up before."""

    def send():
        with suppress(OSError):
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def received(raw: bytes):
    left, right = socket.socketpair()
    with left:
        sender = sending(left, raw)
        try:
            with right:
                return frames.receive(right, largest=1 << 16, seconds=5.0)
        finally:
            sender.join()


def changed_frame(random: Random, header: dict, bodies: list[bytes]) -> bytes:
    """A frame of which the header's JSON, the body, or any byte of the whole is another."""
    raw, body = json.dumps(header).encode(), random.choice(bodies)
    what = random.random()
    if what < 0.5:
        raw = changed_json(random, header)
    elif what < 0.7:
        body = mangled(random, bodies)
    whole = frame(raw, body)
    return mangled(random, [whole], head=12) if what >= 0.7 else whole


def test_a_malformed_frame_is_received_or_refused(thorough):
    header = {"kind": "train", "header": json.dumps(ANSWER)}
    tally = survey(received, lambda r: changed_frame(r, header, [b"", b"x" * 900, bytes(range(256))]), thorough)
    assert tally["read"] and set(tally) == {"read", "WireError"}


@pytest.fixture
def broken():
    """Log records of whatever was caught at a boundary because nothing typed was raised."""

    class Broken(logging.Handler):
        def __init__(self):
            super().__init__()
            self.records: list[logging.LogRecord] = []

        def emit(self, record):
            assert record.getMessage().isprintable()
            if record.exc_info:
                self.records.append(record)

    handler, log = Broken(), logging.getLogger("fl_dpgan")
    log.addHandler(handler)
    yield handler.records
    log.removeHandler(handler)


@pytest.fixture
def guarding(request_of, tmp_path):
    """What a guard says to bytes on its socket, as the typed error where it refuses them."""
    fed = request_of[0]
    guard = Guard(fed.sites[0], QUESTION, path=tmp_path / "g.sock", lock=tmp_path / "lock", largest=1 << 17)

    def ask(raw: bytes) -> str:
        left, right = socket.socketpair()
        with left:
            sender = sending(left, raw)
            guard._attend(right)
            sender.join()
            reply, _ = frames.receive(left, largest=1 << 20, seconds=5.0)
        if reply["state"] == "refused":
            raise WireError(reply["reason"])
        assert reply["state"] == "answer", reply
        return reply["header"]

    yield ask
    guard.stop()
    guard.serve()


def test_whatever_comes_over_the_guards_socket_is_answered_or_refused(request_of, guarding, broken, thorough):
    _, request, tensors = request_of
    samples = [
        ({"kind": "train", "header": json.dumps(request)}, [tensors, tensors[:500]]),
        ({"kind": "query", "header": QUESTION.model_dump_json()}, [b""]),
    ]

    def make(random):
        header, bodies = random.choice(samples)
        what = random.random()
        if what < 0.35:
            inner = request if header["kind"] == "train" else json.loads(header["header"])
            told = _surrogates(random, text(changed_json(random, inner)))
            return frame(json.dumps({**header, "header": told}).encode(), random.choice(bodies))
        if what < 0.6 and header["kind"] == "train":
            return frame(json.dumps(header).encode(), changed_safetensors(random, bodies[:1]))
        return changed_frame(random, header, bodies)

    def parse(raw):
        said = json.loads(guarding(raw))
        assert not broken, broken[0].exc_info[1]
        if said.get("status") in ("refused", "withdrawn"):
            raise WireError(said["reason"])

    assert json.loads(guarding(frame(json.dumps(samples[0][0]).encode(), tensors)))["status"] == "trained"
    tally = survey(parse, make, thorough)
    assert tally["read"] and set(tally) == {"read", "WireError"}


def test_whatever_a_guard_says_is_an_answer_or_a_typed_error_to_flowers_side(tmp_path, monkeypatch, thorough):
    monkeypatch.setattr(relay, "_AGAIN", 0.0)
    monkeypatch.setattr(relay, "SILENCE", 5.0)
    path, said = tmp_path / "g.sock", []
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def serve():
        while True:
            connection, _ = listening.accept()
            with connection:
                if frames.receive(connection, largest=1000, seconds=5.0)[0]["kind"] == "end":
                    return
                with suppress(OSError):  # it has hung up on what it will not read
                    connection.sendall(said.pop() if said else frame(b'{"state": "refused", "reason": "no more"}'))

    def parse(raw):
        said[:] = [raw]
        return relay.ask(path, "train", "{}", b"")

    def make(random):
        whole = random.choice([{"state": "answer", "header": json.dumps(ANSWER)}, {"state": "wait"}, {"state": "full"},
                               {"state": "refused", "reason": "the\nreason"}])  # fmt: skip
        return changed_frame(random, whole, [b"", b"x" * 300]) + changed_frame(random, whole, [b"y"])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        tally = survey(parse, make, thorough)
    finally:
        with pytest.raises(WireError):
            relay.ask(path, "end", "{}", b"")
        thread.join()
        listening.close()
    assert tally["read"] and set(tally) == {"read", "WireError"}


# --- the server's side


def test_whatever_a_node_answers_is_an_outcome_of_the_round_and_never_an_error(request_of, thorough):
    _, request, _ = request_of
    plan = wire.Request.model_validate(request).plan

    def make(random):
        return [text(changed_json(random, ANSWER)) for _ in range(random.choice([1, 1, 2]))]

    def parse(told):
        exchange = Exchange("test", {"site-0": SiteRecord(1, plan)}, ttl=10.0)
        (message,) = exchange.requests(1, b"", "discriminator_update", [1])
        reply = Message(pack_parts([(one, b"x") for one in told]), reply_to=grid_sent(message))
        found = list(exchange.answers(1, [reply]))
        outcome = exchange.outcomes["site-0"]
        assert set(exchange.outcomes) == {"site-0"} and len(json.dumps(outcome)) < 8000
        json.dumps([answer.model_dump(mode="json") for _, answer, _ in found], allow_nan=False)
        if outcome["status"] == "left out":
            raise WireError(outcome["reason"])

    tally = survey(parse, make, thorough)
    assert tally["read"] and set(tally) == {"read", "WireError"}


def test_whatever_a_node_introduces_is_admitted_or_said_not_to_have_joined(request_of, thorough):
    plan = request_of[0].plan
    hello = {"site": "site-0", "declared_size": 40, "unit": "image", "order": 8.0}

    def parse(told):
        roster = Roster(plan, QUESTION)
        (question,) = roster.questions([1])
        said = roster.admit([Message(pack_parts([(told, b"")]), reply_to=grid_sent(question))])
        assert len(roster.sites) == 1 - len(said)
        for reason in said:
            raise WireError(reason)

    tally = survey(parse, lambda random: text(changed_json(random, random.choice([hello, hello, ANSWER]))), thorough)
    assert tally["read"] and set(tally) == {"read", "WireError"}


def test_the_mutators_reach_every_field(request_of):
    valid = request_of[1]
    hit = set()
    for number in range(2000):
        made = changed(Random(number), valid)
        if isinstance(made, dict):
            hit |= {key for key in valid if made.get(key, VALUES) != valid[key]}
    assert hit == set(valid)
