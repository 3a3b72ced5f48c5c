"""systemd finds nothing wrong with the service unit of the SuperLink."""

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "server" / "deploy" / "fl-dpgan-superlink.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_the_unit_verifies(tmp_path):
    program = "/opt/fl-dpgan/.venv/bin/fl-dpgan"
    text = UNIT.read_text()
    assert text.count(program) == 1
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace(program, "/bin/true"))  # the program has to exist where it is verified
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    # an unknown key is a warning alone, and the exit code 0
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert "ProtectSystem=strict" in text and "User=fl-dpgan" in text
