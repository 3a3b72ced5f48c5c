"""systemd finds nothing wrong with the service units, and the guard's closes what it has to."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNITS = sorted(ROOT.glob("*/deploy/*.service"))


def settings(unit: Path) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_unit_verifies(tmp_path, unit):
    text, program = unit.read_text(), settings(unit)["ExecStart"].split()[0]
    assert program.startswith("/opt/fl-dpgan") and program.endswith("/fl-dpgan")
    copy = tmp_path / unit.name
    copy.write_text(text.replace(program, "/bin/true"))  # the program has to exist where it is verified
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    # an unknown key is a warning alone, and the exit code 0; of other units of ours it knows nothing
    said = [line for line in done.stderr.splitlines() if "fl-dpgan-guard.service not found" not in line]
    assert (done.returncode, said) == (0, [])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_every_unit_has_a_user_of_its_own_and_writes_nowhere_else(unit):
    found = settings(unit)
    assert found["User"] not in ("root", "") and found["ProtectSystem"] == "strict"
    assert found["NoNewPrivileges"] in ("yes", "true") and found["StateDirectory"]


def test_there_are_three_and_no_two_share_a_user_or_a_folder():
    assert len(UNITS) == len({settings(unit)["User"] for unit in UNITS}) == 3
    assert len({settings(unit)["StateDirectory"] for unit in UNITS}) == 3  # systemd gives it to the unit's user


def test_the_guard_has_no_network_and_leaves_no_image_of_its_memory():
    found = settings(ROOT / "clients" / "deploy" / "fl-dpgan-guard.service")
    assert found["PrivateNetwork"] == "yes" and found["RestrictAddressFamilies"] == "AF_UNIX"
    assert found["LimitCORE"] == "0" and found["RuntimeDirectoryMode"] == "0750" and found["UMask"] == "0077"


def test_the_installer_is_a_shell_script_without_a_fault():
    script = ROOT / "clients" / "deploy" / "install.sh"
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["sh", "-n", str(script)], capture_output=True, timeout=60).returncode == 0
