"""The light `flwr-clientapp`: the same program as Flower's, without the SuperNode's server and database."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fl_dpgan.deploy.launcher import write_launcher
from fl_dpgan.errors import ConfigError

PLAIN = Path(sys.executable).with_name("flwr-clientapp")


def said(program: Path, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, check=True, env={**os.environ, **variables}
    )
    return done.stdout + done.stderr


def imports(program: Path) -> set[str]:
    lines = said(program, "--help", PYTHONPROFILEIMPORTTIME="1").splitlines()
    return {line.rpartition("|")[2].strip() for line in lines}


def test_it_takes_the_same_options_as_flowers_own(tmp_path):
    write_launcher(tmp_path)
    assert said(tmp_path / "flwr-clientapp", "--help") == said(PLAIN, "--help")


def test_it_loads_neither_the_supernode_nor_its_database(tmp_path):
    write_launcher(tmp_path)
    loaded = {program: imports(program) for program in (PLAIN, tmp_path / "flwr-clientapp")}
    heavy = {"flwr.supernode.cli.flower_supernode", "sqlalchemy", "alembic"}
    assert heavy <= loaded[PLAIN]
    assert not heavy & loaded[tmp_path / "flwr-clientapp"]


def test_it_is_written_anew_each_time_and_for_its_owner_alone(tmp_path):
    for _ in range(2):
        write_launcher(tmp_path / "bin")
    assert (tmp_path / "bin" / "flwr-clientapp").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "bin").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "bin").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_launcher(tmp_path / "bin")
