"""What a killed process leaves behind is ended, and nothing else is."""

import os
import subprocess
import sys
import threading
import time

import psutil

from fl_dpgan.federation.reaper import reap

#: Starts a process that outlives it, says which, and waits.
PARENT = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"


def started(code):
    """A process of this code, and the one that it says it has started."""
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return parent, psutil.Process(int(parent.stdout.readline()))


def killed(parent):
    parent.kill()
    parent.wait(20)
    parent.stdin.close(), parent.stdout.close()


def ended(process, seconds=20.0):
    try:
        process.wait(seconds)
    except psutil.TimeoutExpired:
        return False
    return True


def test_the_descendants_of_a_process_that_is_gone_are_killed_and_no_others():
    (parent, child), (stranger, other) = started(PARENT), started(PARENT)
    read_end, write_end = os.pipe()
    reaping = threading.Thread(target=reap, args=(read_end, psutil.Process(parent.pid)))
    reaping.start()
    time.sleep(3)  # it looks every second
    assert child.is_running()
    killed(parent)
    assert not ended(child, 0.2)  # it has outlived its parent
    os.close(write_end)
    reaping.join(20)
    assert not reaping.is_alive() and ended(child)
    assert other.is_running() and stranger.poll() is None
    other.kill(), killed(stranger), os.close(read_end)


def test_a_process_that_is_watched_leaves_nothing_behind_when_it_is_killed():
    parent, child = started(f"from fl_dpgan.federation.reaper import watch; watch(); {PARENT}")
    time.sleep(5)  # the watching process starts, and looks once
    assert child.is_running()
    killed(parent)
    assert ended(child)
