"""Frames on a socket: what is sent arrives, and whatever else comes is a typed error that costs little memory."""

import json
import socket
import struct
import threading
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_dpgan.errors import WireError
from fl_dpgan.federation import frames


def received(raw: bytes, *, largest: int = 1000, seconds: float = 5.0) -> tuple[dict[str, str], bytes]:
    """What arrives of these bytes, after which the sender is gone."""
    left, right = socket.socketpair()
    with left, right:
        sender = threading.Thread(target=lambda: (left.sendall(raw), left.close()))
        sender.start()
        try:
            return frames.receive(right, largest=largest, seconds=seconds)
        finally:
            right.close()
            sender.join()


def frame(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">IQ", len(header), len(body)) + header + body


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=50), max_size=5), st.binary(max_size=3000))
@settings(max_examples=100, deadline=None)
def test_what_is_sent_arrives(header, body):
    left, right = socket.socketpair()
    with left, right:
        thread = threading.Thread(target=frames.send, args=(left, header, body))
        thread.start()
        assert frames.receive(right, largest=3000, seconds=5.0) == (header, body)
        thread.join()


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_a_typed_error(raw):
    with pytest.raises(WireError):
        received(raw + b"\xff")  # no prefix of a valid frame is one byte too long and whole


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(
    st.text(), inner), max_leaves=8))  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_a_header_that_is_not_an_object_of_texts_is_refused(value):
    raw = frame(json.dumps(value).encode())
    if isinstance(value, dict) and all(isinstance(inner, str) for inner in value.values()):
        assert received(raw) == (value, b"")
    else:
        with pytest.raises(WireError):
            received(raw)


@pytest.mark.parametrize("header", [b"[" * 100_000, b'{"a": "\xff"}', b"", b"{", b'{"a": NaN}'])
def test_a_header_that_is_not_json_is_refused(header):
    with pytest.raises(WireError, match="header"):
        received(frame(header))


def test_a_frame_of_the_greatest_length_arrives_and_one_byte_more_does_not():
    assert received(frame(b"{}", bytes(1000)), largest=1000)[1] == bytes(1000)
    with pytest.raises(WireError, match="1001"):
        received(frame(b"{}", bytes(1001)), largest=1000)
    with pytest.raises(WireError, match=str(frames.HEADER_LIMIT + 1)):
        received(struct.pack(">IQ", frames.HEADER_LIMIT + 1, 0))


def test_what_a_length_claims_is_not_allocated_before_it_arrives():
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="ended within"):
            received(struct.pack(">IQ", 2, 1 << 30) + b"{}" + bytes(1000), largest=1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_a_sender_that_trickles_does_not_hold_the_receiver():
    left, right = socket.socketpair()
    done = threading.Event()

    def trickle():
        while not done.wait(0.05):
            left.send(b"\0")

    with left, right:
        thread = threading.Thread(target=trickle)
        left.sendall(struct.pack(">IQ", 1000, 0))
        thread.start()
        try:
            with pytest.raises(WireError, match="in time"):
                frames.receive(right, largest=0, seconds=0.4)
        finally:
            done.set()
            thread.join()


def test_a_sender_that_goes_with_what_was_for_it_unread_has_broken_the_connection():
    left, right = socket.socketpair()
    with right:
        right.sendall(b"never read")
        left.close()
        with pytest.raises(WireError, match="the connection broke"):
            frames.receive(right, largest=10, seconds=5.0)


def test_a_frame_without_a_body_is_sent_though_the_other_side_closes_once_it_has_the_header():
    left, right = socket.socketpair()

    class Hasty:
        def sendall(self, data: bytes) -> None:
            left.sendall(data)
            right.close()

    with left:
        frames.send(Hasty(), {"state": "refused"})


def test_a_frame_has_no_time_left_once_its_seconds_are_over_though_all_of_it_is_there():
    with pytest.raises(WireError, match="did not arrive in time"):
        received(frame(b"{}"), seconds=0.0)
