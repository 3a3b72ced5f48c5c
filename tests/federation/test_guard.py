"""The guard: the same answers as the site's own, one at a time, and nothing that comes over its socket harms it."""

import errno
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from conftest import LocalGrid, charges, grid_sent, log
from flwr.app import Message, MessageType, RecordDict

from fl_dpgan.errors import ConfigError, WireError
from fl_dpgan.federation import frames, guard, relay, wire
from fl_dpgan.federation.client import Pack
from fl_dpgan.federation.guard import Guard
from fl_dpgan.report.budgets import budget_rows

QUESTION = wire.Question(classes=("healthy", "ill"), fingerprint="a" * 64)
LARGEST = 1 << 20


@contextmanager
def guarded(site, ledger: Path, *, path: Path | None = None, largest: int = LARGEST):
    """A guard at work in a thread; gives its socket and itself."""
    path = path or ledger.with_suffix(".sock")
    made = Guard(site, QUESTION, path=path, lock=Path(f"{ledger}.guard"), largest=largest)
    thread = threading.Thread(target=made.serve)
    thread.start()
    try:
        yield path, made
    finally:
        made.stop()
        thread.join(20)
        assert not thread.is_alive()


class Slow:
    """A site that works until it is told to go on; counts how many requests it works on at once."""

    def __init__(self, site):
        self._site, self.began, self.go_on = site, threading.Event(), threading.Event()
        self.at_once, self.most, self.answered = 0, 0, 0

    def __getattr__(self, name):
        return getattr(self._site, name)

    def answer(self, header, tensors, carrier):
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.began.set()
        assert self.go_on.wait(20)
        found = self._site.answer(header, tensors, carrier)
        self.at_once -= 1
        self.answered += 1
        return found


def part(message: Message) -> tuple[str, bytes]:
    header, tensors = wire.unpack(message, wire.Request)
    return header.model_dump_json(), tensors


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    connection.connect(str(path))
    return connection


def state(connection: socket.socket) -> str:
    return frames.receive(connection, largest=LARGEST, seconds=20)[0]["state"]


def test_an_answer_through_the_guard_is_the_sites_own_to_the_byte(federation):
    alone, behind = federation("alone"), federation("behind")
    with guarded(behind.sites[0], behind.ledger(0)) as (path, _):
        for number in (1, 2):
            direct = Pack([alone.sites[0]]).train(alone.request(0, number))
            passed = relay.answer(behind.request(0, number), path)
            answers = [wire.unpack(reply, wire.Answer) for reply in (direct, passed)]
            assert answers[0][1] == answers[1][1] and answers[0][0].status == answers[1][0].status == "trained"
    assert charges(alone) == charges(behind)


def test_a_federation_runs_through_guards(federation):
    fed = federation(sites=2, rounds=2)
    with guarded(fed.sites[0], fed.ledger(0)) as (one, _), guarded(fed.sites[1], fed.ledger(1)) as (two, _):
        grid = LocalGrid({10: lambda m: relay.answer(m, one), 11: lambda m: relay.answer(m, two)})
        fed.strategy(question=QUESTION).start(grid)
    rounds = [record for record in log(fed) if "sites" in record]
    assert [site["status"] for record in rounds for site in record["sites"].values()] == ["trained"] * 4


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (
            wire.Question(classes=("ill", "healthy"), fingerprint="a" * 64),
            "labels here are healthy, ill, at the server",
        ),
        (wire.Question(classes=QUESTION.classes, fingerprint="b" * 64), "networks or D's learning rate differ"),
        (wire.Question(), "labels here are healthy, ill"),
    ],
)
def test_a_server_of_another_federation_is_refused_and_both_sides_are_told(federation, asked, reason):
    fed = federation(sites=2, rounds=1)
    with guarded(fed.sites[0], fed.ledger(0)) as (path, _):
        other = Pack([fed.sites[1]])
        answers = {MessageType.QUERY: other.hello, MessageType.TRAIN: other.train}
        grid = LocalGrid({10: lambda m: relay.answer(m, path), 11: lambda m: answers[m.metadata.message_type](m)})
        fed.strategy(question=asked).start(grid)
    first, *rest = log(fed)
    assert reason in first["not_joined"][0] and "site-0" in first["not_joined"][0]
    assert list(rest[0]["sites"]) == ["site-1"] and charges(fed) == []
    assert not [record for record in rest if "not_joined" in record]  # said once, though asked again


def test_the_socket_is_for_owner_and_group_alone(federation):
    fed = federation()
    with guarded(fed.sites[0], fed.ledger(0)) as (path, _):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert not path.exists()


def test_a_second_guard_of_one_ledger_is_refused(federation, tmp_path):
    fed = federation()
    with (
        guarded(fed.sites[0], fed.ledger(0)),
        pytest.raises(ConfigError, match="another guard serves this ledger"),
        guarded(fed.sites[0], fed.ledger(0), path=tmp_path / "other.sock"),
    ):
        pass


def test_a_socket_that_a_killed_guard_has_left_is_replaced(federation):
    fed = federation()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(fed.ledger(0).with_suffix(".sock")))
    left.close()
    with guarded(fed.sites[0], fed.ledger(0)) as (path, _):
        assert wire.unpack(relay.answer(fed.request(), path), wire.Answer)[0].status == "trained"


def test_what_lies_where_the_socket_is_to_be_is_not_removed_unless_it_is_a_socket(federation, tmp_path):
    fed = federation()
    (tmp_path / "mine").write_text("a file of the site's")
    with pytest.raises(ConfigError, match="is no socket"), guarded(fed.sites[0], fed.ledger(0), path=tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").read_text() == "a file of the site's"


def test_what_a_server_says_cannot_forge_a_line_of_the_guards_log(federation, caplog):
    fed = federation()
    asked = wire.Question(classes=("x\n2026-11-30 INFO round 7: trained",))
    with guarded(fed.sites[0], fed.ledger(0)) as (path, _):
        relay.ask(path, "query", asked.model_dump_json(), b"")
    assert all(record.getMessage().isprintable() for record in caplog.records if record.name.startswith("fl_dpgan"))
    assert "did not join" in caplog.text


@pytest.mark.parametrize("name", ["no/folder/g.sock", "x" * 120])
def test_a_socket_that_cannot_be_made_is_one_line(federation, tmp_path, name):
    fed = federation()
    with (
        pytest.raises(ConfigError, match=r"guard\.socket") as caught,
        guarded(fed.sites[0], fed.ledger(0), path=tmp_path / name),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_without_a_guard_the_server_is_told_only_that_the_site_cannot_take_part(federation, tmp_path):
    fed = federation()
    reply = relay.answer(fed.request(), tmp_path / "none.sock")
    assert reply.has_error() and str(tmp_path) not in reply.error.reason


@pytest.mark.parametrize("content", [RecordDict(), "two"])
def test_a_message_of_another_form_is_not_passed_on(federation, content):
    fed = federation()
    message = fed.request()
    message.content = wire.pack_parts([part(message)] * 2) if content == "two" else content
    with guarded(fed.sites[0], fed.ledger(0)) as (path, _):
        assert relay.answer(message, path).has_error()
    assert charges(fed) == []


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_client_that_dies_within_a_message_costs_nothing(federation, share):
    fed = federation()
    header, tensors = part(fed.request())
    raw = _raw({"kind": "train", "header": header}, tensors)
    with guarded(fed.sites[0], fed.ledger(0)) as (path, _):
        with connected(path) as connection:
            connection.sendall(raw[: int(share * len(raw))])
        assert charges(fed) == []
        assert wire.unpack(relay.answer(fed.request(), path), wire.Answer)[0].status == "trained"
    assert len(charges(fed)) == 1


def test_a_client_that_dies_while_the_site_works_stays_charged_and_a_repetition_gets_the_stored_answer(federation):
    fed = federation()
    slow = Slow(fed.sites[0])
    with guarded(slow, fed.ledger(0)) as (path, _):
        with connected(path) as connection:
            frames.send(connection, *_request(fed))
            assert slow.began.wait(20)
        slow.go_on.set()
        deadline = time.monotonic() + 20
        while not slow.answered and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(charges(fed)) == 1
        first = wire.unpack(relay.answer(fed.request(), path), wire.Answer)
        again = wire.unpack(relay.answer(fed.request(), path), wire.Answer)
    assert first == again and first[0].status == "trained" and len(charges(fed)) == 1


def test_two_clients_are_served_one_at_a_time_and_the_second_is_told_to_wait(federation, monkeypatch):
    monkeypatch.setattr(guard, "_SIGN", 0.1)
    fed = federation()
    slow = Slow(fed.sites[0])
    with guarded(slow, fed.ledger(0)) as (path, _), connected(path) as one, connected(path) as two:
        frames.send(one, *_request(fed, 1))
        assert slow.began.wait(20)
        frames.send(two, *_request(fed, 2))
        assert [state(two) for _ in range(3)] == ["wait"] * 3
        slow.go_on.set()
        for connection in (one, two):
            while (said := state(connection)) == "wait":
                pass
            assert said == "answer"
    assert slow.most == 1 and slow.answered == 2


def test_one_who_leaves_the_queue_is_not_served(federation, monkeypatch):
    monkeypatch.setattr(guard, "_SIGN", 0.05)
    fed = federation()
    slow = Slow(fed.sites[0])
    with guarded(slow, fed.ledger(0)) as (path, _), connected(path) as one:
        frames.send(one, *_request(fed, 1))
        assert slow.began.wait(20)
        with connected(path) as two:
            frames.send(two, *_request(fed, 2))
            assert state(two) == "wait"
        time.sleep(0.5)  # several signs of life that reach nobody
        slow.go_on.set()
    assert slow.answered == 1 and len(charges(fed)) == 1


def test_a_thousand_at_once_are_each_served_or_told_to_come_again(federation):
    fed = federation()
    before = fed.request()
    header, tensors = part(before)
    said = []

    def ask():
        try:
            with connected(path) as connection:
                frames.send(connection, {"kind": "train", "header": header}, tensors)
                while (heard := state(connection)) == "wait":
                    pass
                said.append(heard)
        except OSError as error:
            said.append(type(error).__name__)  # the guard has closed before all was sent: "full"
        except Exception as error:
            said.append(str(error))

    with guarded(fed.sites[0], fed.ledger(0)) as (path, _):
        threads = [threading.Thread(target=ask) for _ in range(1000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(said) == 1000 and said.count("answer") >= 1
        assert wire.unpack(relay.answer(before, path), wire.Answer)[0].status == "trained"
    assert len(charges(fed)) == 1  # a repeated request is one event


def test_the_relay_comes_again_where_all_places_are_taken(federation, monkeypatch):
    monkeypatch.setattr(guard, "PLACES", 1)
    monkeypatch.setattr(relay, "_AGAIN", 0.05)
    fed = federation()
    slow = Slow(fed.sites[0])
    with guarded(slow, fed.ledger(0)) as (path, _), connected(path) as one:
        frames.send(one, *_request(fed, 1))
        assert slow.began.wait(20)
        found = []
        # more than the socket's buffer holds: the guard closes while it is sent
        asked = part(fed.request(0, 2))[0], bytes(LARGEST)
        thread = threading.Thread(target=lambda: found.append(relay.ask(path, "train", *asked)))
        thread.start()
        time.sleep(0.3)
        assert not found
        slow.go_on.set()
        thread.join(20)
    assert wire.parse(found[0][0], wire.Answer).rule == "wire"


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ({"kind": "train"}, b""),
        ({"kind": "train", "header": "x", "more": "y"}, b""),
        ({}, b""),
        ({"kind": "train", "header": "{}"}, bytes(LARGEST + 1)),
    ],
)
def test_what_is_not_a_request_is_refused_before_the_site_sees_it(federation, header, body):
    fed = federation()
    with guarded(fed.sites[0], fed.ledger(0)) as (path, _), connected(path) as connection:
        try:
            frames.send(connection, header, body)
        except OSError:
            assert len(body) > LARGEST  # refused by its length, and not read
        assert state(connection) == "refused"
    assert charges(fed) == []


@pytest.mark.parametrize("kind", ["query", "train", "evaluate", "system", ""])
@pytest.mark.parametrize("header", ["", "{}", '{"run": 1}', "[]", "\u0000"])
def test_a_request_that_the_site_refuses_is_answered_with_a_refusal(federation, kind, header):
    fed = federation()
    with guarded(fed.sites[0], fed.ledger(0)) as (path, _):
        answer, body = relay.ask(path, kind, header, b"")
    if kind == "query" and header == "{}":
        assert wire.parse(answer, wire.Answer).rule == "federation"  # a simulation's server: of no federation
    else:
        assert wire.parse(answer, wire.Answer).rule == "wire"
    assert body == b"" and charges(fed) == []


def test_the_request_in_work_is_finished_when_the_guard_is_stopped(federation):
    fed = federation()
    slow = Slow(fed.sites[0])
    with guarded(slow, fed.ledger(0)) as (path, made), connected(path) as one:
        frames.send(one, *_request(fed))
        assert slow.began.wait(20)
        made.stop()
        time.sleep(0.5)
        slow.go_on.set()
        assert state(one) == "answer"
    assert len(charges(fed)) == 1


def test_a_guard_that_starts_again_continues_the_budget(federation):
    fed = federation(rounds=3)
    spent = []
    for number in (1, 2, 3):
        with guarded(fed.site(0), fed.ledger(0)) as (path, _):
            assert wire.unpack(relay.answer(fed.request(0, number), path), wire.Answer)[0].status == "trained"
        spent.append(budget_rows(fed.ledger(0))[0]["spent"])
    assert 0 < spent[0] < spent[1] < spent[2]
    assert sum(event.count for event in charges(fed)) == 6


def test_a_ledger_that_cannot_be_written_charges_nothing_and_releases_nothing(federation):
    """As on a full disk: what the site answers tells no more than that it failed."""
    fed = federation()
    with guarded(fed.sites[0], fed.ledger(0)) as (path, _):
        fed.ledger(0).write_bytes(b"")
        answer, body = wire.unpack(relay.answer(fed.request(), path), wire.Answer)
    assert answer.status == "failed" and body == b"" and str(fed.path) not in answer.reason


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_on_a_full_disk_nothing_is_charged_or_released_and_with_space_the_guard_goes_on(federation, tmp_path):
    (tmp_path / "run").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path / "run")], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        fed = federation()
        with guarded(fed.sites[0], fed.ledger(0), path=tmp_path / "g.sock") as (path, _):
            with suppress(OSError), (tmp_path / "run" / "filler").open("wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    pass
            answer, body = wire.unpack(relay.answer(fed.request(), path), wire.Answer)
            assert answer.status == "failed" and body == b"" and str(tmp_path) not in answer.reason
            (tmp_path / "run" / "filler").unlink()
            assert charges(fed) == []
            assert wire.unpack(relay.answer(fed.request(), path), wire.Answer)[0].status == "trained"
            assert len(charges(fed)) == 1
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path / "run")], check=True)


def test_the_relay_needs_neither_torch_nor_data_nor_pydantic():
    found = "[m for m in ('torch', 'pydantic', 'fl_dpgan.data') if m in sys.modules]"
    code = f"import sys, fl_dpgan.federation.relay; print({found})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _request(fed, number: int = 1) -> tuple[dict[str, str], bytes]:
    header, tensors = part(grid_sent(fed.request(0, number)))
    return {"kind": "train", "header": header}, tensors


def _raw(header: dict[str, str], body: bytes) -> bytes:
    left, right = socket.socketpair()
    with left, right:
        thread = threading.Thread(target=lambda: (frames.send(left, header, body), left.close()))
        thread.start()
        raw = b"".join(iter(lambda: right.recv(1 << 16), b""))
        thread.join()
    return raw


def test_the_relay_waits_while_the_guard_gives_signs_of_life_and_has_the_answer_in_the_end(federation, monkeypatch):
    monkeypatch.setattr(guard, "_SIGN", 0.05)
    fed = federation()
    slow = Slow(fed.sites[0])
    with guarded(slow, fed.ledger(0)) as (path, _):
        found = []
        thread = threading.Thread(target=lambda: found.append(relay.ask(path, "train", *part(fed.request()))))
        thread.start()
        assert slow.began.wait(20)
        time.sleep(0.3)
        assert not found
        slow.go_on.set()
        thread.join(20)
    assert wire.parse(found[0][0], wire.Answer).status == "trained"


def test_the_relay_says_what_the_guard_refuses(federation):
    fed = federation()
    with (
        guarded(fed.sites[0], fed.ledger(0)) as (path, _),
        pytest.raises(WireError, match=f"the guard says refused: a frame of .* the most are .* and {LARGEST}"),
    ):
        relay.ask(path, "train", "{}", bytes(LARGEST + 1))


def test_the_relays_patience_ends(federation, monkeypatch):
    monkeypatch.setattr(guard, "PLACES", 0)
    monkeypatch.setattr(relay, "_AGAIN", 0.05)
    monkeypatch.setattr(relay, "_PATIENCE", 0.3)
    fed = federation()
    with guarded(fed.sites[0], fed.ledger(0)) as (path, _), pytest.raises(WireError, match="no place"):
        relay.ask(path, "train", *part(fed.request()))
    assert charges(fed) == []


def test_who_asks_while_the_guard_stops_is_told_to_come_again(federation):
    fed = federation()
    with guarded(fed.sites[0], fed.ledger(0)) as (path, made), connected(path) as late:
        deadline = time.monotonic() + 20
        made.stop()
        while path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        frames.send(late, *_request(fed))
        assert state(late) == "full"
    assert charges(fed) == []


def test_who_is_in_the_queue_when_the_guard_stops_gets_no_answer_and_costs_nothing(federation):
    fed = federation()
    slow = Slow(fed.sites[0])
    with guarded(slow, fed.ledger(0)) as (path, made), connected(path) as one, connected(path) as two:
        frames.send(one, *_request(fed, 1))
        assert slow.began.wait(20)
        frames.send(two, *_request(fed, 2))
        time.sleep(0.2)
        made.stop()
        time.sleep(0.5)
        slow.go_on.set()
        assert state(one) == "answer"
        with pytest.raises(WireError, match="ended within a frame"):
            state(two)
    assert slow.answered == 1 and len(charges(fed)) == 1


def test_an_answer_that_is_none_ends_its_connection_and_not_the_guard(federation, monkeypatch, caplog):
    fed = federation()
    with guarded(fed.sites[0], fed.ledger(0)) as (path, _):
        with monkeypatch.context() as patch:
            patch.setattr(fed.sites[0], "answer", lambda *request: ("no header", b""))
            with pytest.raises(WireError, match="ended within a frame"):
                relay.ask(path, "train", *part(fed.request()))
        assert "a connection failed" in caplog.text
        assert wire.unpack(relay.answer(fed.request(), path), wire.Answer)[0].status == "trained"


def test_a_connection_that_cannot_be_taken_is_logged_and_the_next_is_served(federation, monkeypatch, caplog):
    fed, failed = federation(), threading.Event()
    accept = socket.socket.accept

    def at_first_none(listening):
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", at_first_none)
    with guarded(fed.sites[0], fed.ledger(0)) as (path, _):
        assert wire.unpack(relay.answer(fed.request(), path), wire.Answer)[0].status == "trained"
    assert failed.is_set() and "a connection could not be taken: Too many open files" in caplog.text


def test_a_lock_that_cannot_be_made_is_a_config_error(federation, tmp_path):
    fed = federation()
    with pytest.raises(ConfigError, match="cannot be made: No such file or directory"):
        Guard(fed.sites[0], QUESTION, path=tmp_path / "g.sock", lock=tmp_path / "no" / "lock", largest=LARGEST)
