"""What the processes of a schedule share: which faults have struck, how far clocks are off, and journals.

All of it is memory that outlives whoever is killed, and that no full disk touches.
"""

import json
import mmap
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

from faults import SITES, Fault, Schedule

_USED, _LENGTHS, _CLOCK = struct.Struct("=Q"), struct.Struct("=IQ"), struct.Struct("=d")
_time = time.time


class Journal:
    """Notes of one process in order, each whole or not there; made before the process is."""

    def __init__(self, size: int = 1 << 25) -> None:
        self._memory = mmap.mmap(-1, size)  # pages are taken when they are written
        self._lock = threading.Lock()

    def note(self, kind: str, body: bytes = b"", **fields: Any) -> None:
        """Append a note; it is there once this returns."""
        text = json.dumps({"kind": kind, **fields}).encode()
        with self._lock:
            (used,) = _USED.unpack_from(self._memory)
            start = _USED.size + used
            entry = _LENGTHS.pack(len(text), len(body)) + text + body
            self._memory[start : start + len(entry)] = entry
            _USED.pack_into(self._memory, 0, used + len(entry))

    def read(self, kind: str | None = None) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The notes, or those of one kind."""
        (used,) = _USED.unpack_from(self._memory)
        place, end = _USED.size, _USED.size + used
        while place < end:
            text, body = _LENGTHS.unpack_from(self._memory, place)
            place += _LENGTHS.size
            fields = json.loads(self._memory[place : place + text])
            if kind in (None, fields["kind"]):
                yield fields, self._memory[place + text : place + text + body]
            place += text + body

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class Board:
    """Which of a schedule's faults have struck, and by how much each clock is off."""

    def __init__(self, schedule: Schedule) -> None:
        self._faults = schedule.faults
        self._struck = mmap.mmap(-1, max(1, len(self._faults)))
        self._clocks = mmap.mmap(-1, _CLOCK.size * (SITES + 1))
        self.present = mmap.mmap(-1, SITES)  # which nodes are up
        self._lock = threading.Lock()

    def strike(self, kinds: tuple[str, ...], who: int, number: int, point: str = "") -> list[Fault]:
        """The faults that are due here, each given out once."""
        with self._lock:
            due = [
                index
                for index, fault in enumerate(self._faults)
                if not self._struck[index]
                and (fault.who, fault.round, fault.point) == (who, number, point)
                and fault.kind.startswith(kinds)
            ]
            for index in due:
                self._struck[index] = 1
        return [self._faults[index] for index in due]

    @property
    def struck(self) -> list[Fault]:
        """The faults that have struck."""
        return [fault for index, fault in enumerate(self._faults) if self._struck[index]]

    def put_clock(self, who: int, seconds: float) -> None:
        """Put a machine's clock forward by so much."""
        _CLOCK.pack_into(self._clocks, _CLOCK.size * who, seconds)

    def live_by(self, who: int) -> None:
        """Let this process have the clock of that machine."""
        time.time = lambda: _time() + _CLOCK.unpack_from(self._clocks, _CLOCK.size * who)[0]

    def close(self) -> None:
        """Give the memory back."""
        self._struck.close()
        self._clocks.close()
        self.present.close()
