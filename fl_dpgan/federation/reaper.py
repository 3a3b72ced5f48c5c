"""Ends what a killed simulation leaves behind: Ray's agents outlive their driver, so a process waits for its death."""

import contextlib
import os
import select
import subprocess
import sys

import psutil


def watch() -> None:
    """Start a process that kills this one's descendants once this one is gone, however it ends."""
    read_end, write_end = os.pipe()  # the system closes the write end when this process dies, and so wakes the reader
    subprocess.Popen(
        [sys.executable, __file__, str(read_end), str(os.getpid())],
        pass_fds=(read_end,), start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(read_end)
    os.set_inheritable(write_end, False)


def reap(read_end: int, parent: psutil.Process) -> None:
    """Note the parent's descendants every second until it is gone, then kill those that are left."""
    family: set[psutil.Process] = set()
    while not select.select([read_end], [], [], 1.0)[0]:
        with contextlib.suppress(psutil.Error):  # one that ends while it is looked at
            family.update(parent.children(recursive=True))
    for process in family - {psutil.Process()}:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil compares start times, so a reused id is safe
            process.kill()


if __name__ == "__main__":
    reap(int(sys.argv[1]), psutil.Process(int(sys.argv[2])))
