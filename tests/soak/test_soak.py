"""Schedules of random faults on real processes: whatever befalls them, nothing is released uncharged or lost."""

import time
from collections import Counter

import pytest
from examiner import Evidence, examine
from faults import draw
from home import NAMES, can_mount
from trial import Trial


class Tally:
    """What came of the schedules so far."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()

    def add(self, found: Evidence) -> None:
        self.faults.update(fault.kind for fault in found.struck)
        self.sums["answers"] += sum(len(found.answers(site)) for site in NAMES)
        self.sums["charges"] += sum(len(found.charges(site)) for site in NAMES)
        self.sums["rounds"] += sum("seconds" in record for record in found.log)
        self.sums["servers resumed"] += len(found.server) - 1
        self.sums["one-line errors"] += sum(end.code == 2 for end in found.exits)
        self.sums["stopped for want of budget"] += any("stopped" in record for record in found.log)

    def __str__(self) -> str:
        lines = [f"{times:6d}  {kind}" for kind, times in sorted(self.faults.items())]
        lines += [f"{number:6d}  {what}" for what, number in self.sums.items()]
        return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_after_random_faults_nothing_is_uncharged_lost_or_drawn_twice_and_the_run_ends(tmp_path_factory, schedules):
    folder, tally, began = tmp_path_factory.mktemp("soak"), Tally(), time.monotonic()
    failed: list[str] = []
    disk = "a small tmpfs" if can_mount() else "a limit on the size of files: no tmpfs can be mounted here"
    print(f"\na full disk is {disk}")
    for seed in schedules:
        schedule = draw(seed)
        start = time.monotonic()
        found = Trial(schedule, folder / str(seed)).run()
        print(f"{time.monotonic() - start:5.1f} s  {schedule}", flush=True)
        tally.add(found)
        if complaints := examine(found):
            failed += [str(schedule), *complaints]
            failed.append(f"again: pytest -s tests/soak/test_soak.py --schedules 1 --first-schedule {seed}")
            print(*failed[-len(complaints) - 1 :], sep="\n", flush=True)
    print(f"{len(schedules)} schedules in {time.monotonic() - began:.0f} s")
    print(tally)
    assert not failed, "\n".join(failed)
    print("     0  uncharged, lost or drawn twice")
