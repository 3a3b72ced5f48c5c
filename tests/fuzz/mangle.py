"""Malformed inputs in quantity: mutators over valid samples, and the check that every parser of them must pass.

The mutators take a seeded `Random`, so that an input is known by its number alone.
"""

import copy
import json
import math
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings

from fl_dpgan.errors import FlDpganError

#: Inputs for each parser: all of them with `--thorough`, a share otherwise.
INPUTS, SHARE = 10_000, 300
#: The most CPU seconds that one input may take; a parser that goes through its input twice or so needs milliseconds.
SECONDS = 5.0
#: The most characters of an error: it goes to a terminal, a log, or back to who sent the input.
LONGEST = 1500
#: What stands where a file names a patient; no error may tell it.
SECRET = "Zsaklyn^Qivora"

_INTEGERS = (
    0,
    1,
    2,
    7,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    10**9,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53 + 1,
    2**63,
    2**64 - 1,
)
_FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1e308, -1e308)
_TEXTS = (
    b"\xef\xbb\xbf", b"\x00", b"\xff", b"\xed\xa0\x80", b"\xe2\x80\xae", b"\x1b[2J", b"\n", b"'", b'"', b"{", b"[",
    b",",
)  # fmt: skip
_NUMBERS = (
    b"0", b"-1", b"1000000000", b"99999999999999999999", b"9" * 5000, b"1e999", b"NaN", b"-Infinity", b"0x10",
    b"1.5",
)  # fmt: skip

#: Values of other kinds than a field of JSON or TOML expects, or at the ends of it.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308, *_FLOATS),
    *("", "0", "NaN", "\x00", "\x1b[2J", "\u202e", "é\r\n", "a" * 5000, "../../x", "/etc/passwd", "x\x00y", "main"),
    *([], [[]], [None], [1, 2, 3], {}, {"": None}, {"a": {"a": {}}}, [[[[[[[[[[0]]]]]]]]]]),
)  # fmt: skip


def hypotheses(thorough: bool) -> settings:
    """How Hypothesis is run: the same examples every time, all of them as many as for the mutators."""
    return settings(
        max_examples=INPUTS if thorough else SHARE // 4,  # an example costs more than a mutator's input
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def accepted(error: BaseException) -> str:
    """The kind of a typed error, if its text is fit to be shown: one printable line, not long, and of no patient."""
    assert isinstance(error, FlDpganError), f"an untyped {type(error).__name__}: {error!s:.300}"
    said = str(error)
    assert said.isprintable(), f"an error that cannot be printed: {said!r:.300}"
    assert len(said) <= LONGEST, f"an error of {len(said)} characters: {said:.300}"
    assert not set(SECRET.split("^")) & set(said.replace("^", " ").split()) and SECRET not in said, said
    return type(error).__name__


I = TypeVar("I")  # noqa: E741


def survey(
    parse: Callable[[I], Any], make: Callable[[Random], I], thorough: bool, *, inputs: int | None = None
) -> Counter[str]:
    """Parse many inputs, and count how it went: `read`, or the kind of the typed error.

    Args:
        inputs: how many, where the usual share takes too long.
    """
    tally: Counter[str] = Counter()
    count = INPUTS if thorough else inputs or SHARE
    began = time.perf_counter()
    for number in range(count):
        content = make(Random(number))
        start = time.thread_time()
        try:
            parse(content)
            outcome = "read"
        except Exception as error:
            try:
                outcome = accepted(error)
            except AssertionError as wrong:
                raise AssertionError(f"input {number}: {wrong}\n{content!r:.1500}") from error
        took = time.thread_time() - start
        assert took < SECONDS, f"input {number} took {took:.1f} s\n{content!r:.1500}"
        tally[outcome] += 1
    assert set(tally) != {"read"}, "no input was refused: they are not malformed"
    print(f"{count} inputs in {time.perf_counter() - began:.1f} s: {dict(tally.most_common())}")
    return tally


# --- bytes


def mangled(random: Random, samples: Sequence[bytes], *, head: int = 300) -> bytes:
    """One of the samples with one to four changes; half of them among its first `head` bytes, where headers are."""
    data = bytearray(random.choice(samples))
    if random.random() < 0.01:
        return random.randbytes(random.choice([0, 1, 8, 200]))
    for _ in range(random.choice([1, 1, 2, 4])):
        end = min(head, len(data)) if random.random() < 0.5 else len(data)
        random.choice(_CHANGES)(random, data, random.randrange(end + 1), samples)
    return bytes(data)


def _flip(random: Random, data: bytearray, at: int, samples: Sequence[bytes]) -> None:
    for place in range(at, min(at + random.choice([1, 1, 4]), len(data))):
        data[place] ^= 1 << random.randrange(8)


def _integer(random: Random, data: bytearray, at: int, samples: Sequence[bytes]) -> None:
    """A length, a count or the like: 1 to 8 bytes, in either order, at the ends of their range or off by one."""
    width, order = random.choice([1, 2, 4, 8]), random.choice(["little", "big"])
    near = int.from_bytes(data[at : at + width], order) + random.choice([-1, 1])
    value = random.choice([*_INTEGERS, near, near]) % (1 << 8 * width)
    data[at : at + width] = value.to_bytes(width, order)


def _float(random: Random, data: bytearray, at: int, samples: Sequence[bytes]) -> None:
    form = random.choice(["<f", "<d", ">f", ">d"])
    value = random.choice(_FLOATS[:5] if form[1] == "f" else _FLOATS)
    data[at : at + struct.calcsize(form)] = struct.pack(form, value)


def _number(random: Random, data: bytearray, at: int, samples: Sequence[bytes]) -> None:
    """The next number that is written in digits becomes another."""
    digits = b"0123456789"
    first = next((i for i in range(at, len(data)) if data[i] in digits), None)
    if first is not None:
        last = next((i for i in range(first, len(data)) if data[i] not in digits), len(data))
        data[first:last] = random.choice(_NUMBERS)


def _cut(random: Random, data: bytearray, at: int, samples: Sequence[bytes]) -> None:
    del data[at:]


def _drop(random: Random, data: bytearray, at: int, samples: Sequence[bytes]) -> None:
    del data[at : at + random.choice([1, 2, 8, 50])]


def _insert(random: Random, data: bytearray, at: int, samples: Sequence[bytes]) -> None:
    data[at:at] = random.choice([*_TEXTS, random.randbytes(4), bytes(100), bytes(data[at : at + 60])])


def _splice(random: Random, data: bytearray, at: int, samples: Sequence[bytes]) -> None:
    other = random.choice(samples)
    start = random.randrange(len(other) + 1)
    length = random.choice([4, 30, 500])
    data[at : at + length] = other[start : start + length]


def _append(random: Random, data: bytearray, at: int, samples: Sequence[bytes]) -> None:
    data += random.choice([b"\x00", random.randbytes(20), random.choice(samples)])


_CHANGES = (_flip, _flip, _integer, _integer, _integer, _float, _number, _cut, _drop, _insert, _splice, _append)


# --- JSON and TOML


def changed(random: Random, value: Any) -> Any:
    """A copy in which a value somewhere is another one, is gone, is called otherwise, or is there once more."""
    value = copy.deepcopy(value)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        places = list(_places(value))
        if not places or random.random() < 0.02:
            return random.choice(VALUES)
        holder, key = random.choice(places)
        _change(random, holder, key)
    return value


def _places(value: Any) -> Any:
    """Every place in it, as what holds it and its key."""
    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(inner)


def _change(random: Random, holder: Any, key: Any) -> None:
    what = random.random()
    old = holder[key]
    if what < 0.6:
        holder[key] = copy.deepcopy(random.choice(VALUES))
    elif what < 0.7:
        del holder[key]
    elif what < 0.8 and isinstance(old, int | float) and not isinstance(old, bool):
        holder[key] = random.choice([-old, old + 1, old * 1000, str(old), [old]])
    elif what < 0.9 and isinstance(holder, dict):
        name = random.choice(["", "x" * 3000, f"{key} ", "\x1b[2J", "a\nb", "__class__", "\u202e"])
        holder[name] = holder.pop(key) if random.random() < 0.5 else old
    else:
        holder[key] = random.choice([[old], [old, old], {"a": old}, {key: old}])


def changed_json(random: Random, value: Any) -> bytes:
    """The JSON of a changed copy, sometimes with what no value of Python's can express."""
    text = json.dumps(changed(random, value)) if random.random() < 0.85 else json.dumps(value)
    data = text.encode("utf-8", "surrogatepass")
    what = random.random()
    if what < 0.05:  # a key twice
        return data.replace(b"{", b'{"' + random.choice([b"run", b"round", b"plan", b"site"]) + b'": 1, ', 1)
    if what < 0.1:
        return data[: random.randrange(len(data) + 1)]
    if what < 0.13:
        deep = random.choice([200, 100_000, 100_000])
        return random.choice([b"[" * deep, b'{"a":' * deep, b"[" * deep + b"]" * deep])
    if what < 0.16:
        return random.choice(
            [b"\xef\xbb\xbf" + data, text.encode("utf-16"), data + b"\x00", data + data, b"\xff" + data]
        )
    if what < 0.2:
        return data.replace(b'": ', b'": ' + random.choice([*_NUMBERS, b'"\\ud800"', b'"\\u0000"']) + b', "y": ', 1)
    if what < 0.3:
        return mangled(random, [data], head=len(data))
    return data


# --- memory


def growth(work: Callable[[], Any]) -> tuple[int, str]:
    """By how many bytes a process's memory grows, at its peak, while it does this; and how that ends.

    The work is done in a child of this process, whose peak begins with what it takes over.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            before = _peak()
            try:
                work()
                ended = "read"
            except Exception as error:
                ended = f"{type(error).__name__}: {error}"
            os.write(writing, json.dumps([_peak() - before, ended[:2000]]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        found = file.read()
    os.waitpid(child, 0)
    assert found, "the child was killed"
    grown, ended = json.loads(found)
    return grown, ended


def _peak() -> int:
    """The peak of what is resident, in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


# --- safetensors


def changed_safetensors(random: Random, samples: Sequence[bytes]) -> bytes:
    """Safetensors with other bytes, another header, or other values."""
    if random.random() < 0.4:
        return mangled(random, samples, head=500)
    body = random.choice(samples)
    length = int.from_bytes(body[:8], "little")
    header, data = json.loads(body[8 : 8 + length]), bytearray(body[8 + length :])
    if random.random() < 0.3 and data:
        at = random.randrange(0, len(data), 4)
        data[at : at + 4] = struct.pack("<f", random.choice(_FLOATS[:5]))
    elif random.random() < 0.5:
        names = [name for name in header if name != "__metadata__"]
        entry = header[random.choice(names)]
        shape = entry["shape"]
        same = [{"shape": shape[::-1]}, {"shape": [1, *shape]}, {"shape": [math.prod(shape)]}]  # of as many numbers
        entry.update(random.choice([random.choice(_ENTRIES), random.choice(same)]))
    else:
        text = changed_json(random, header)
        return len(text).to_bytes(8, "little") + text + data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


_ENTRIES: tuple[dict[str, Any], ...] = (
    *(
        {"dtype": kind}
        for kind in ("F64", "F16", "BF16", "I64", "U8", "BOOL", "I32", "F8_E4M3", "F8_E5M2", "C64", "F4", "U16")
    ),
    *(
        {"shape": shape}
        for shape in ([], [0], [1], [10**9], [10**9, 10**9], [2**63], [2**64], [-1], [1] * 70, [0, 2**62])
    ),
    *({"data_offsets": ends} for ends in ([0, 0], [0, 10**12], [4, 0], [2**63, 2**63], [0, 2**64], [1, 5], [-4, 0])),
)
