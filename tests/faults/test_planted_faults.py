"""The planted faults fit the source as it is; `python -m tests.faults.run` shows which tests find them."""

import ast
import subprocess

import pytest

from tests.faults.run import ROOT, faults


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_a_fault_applies_to_the_source_and_leaves_it_python(fault, tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: git is not at hand")
    touched = [line.removeprefix("+++ b/") for line in fault.patch.read_text().splitlines() if line.startswith("+++ ")]
    assert touched and all(name.startswith("fl_dpgan/") for name in touched)  # the tests stay as they are
    for name in touched:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    fault.plant(tmp_path)
    for name in touched:
        changed = (tmp_path / name).read_text()
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse((ROOT / name).read_text()))
    assert fault.what.endswith(".")


def test_all_of_the_planned_faults_are_there():
    assert len(faults()) >= 11
