"""A run is followed to its end: continued from where it is, started again where that helps, and never twice at once."""

import json
from pathlib import Path

import pytest

from fl_dpgan.config import load_federation
from fl_dpgan.deploy import follow
from fl_dpgan.deploy.flower import RunStatus, _status
from fl_dpgan.deploy.follow import FollowedRun, checkout, continues
from fl_dpgan.deploy.server import ServerFolder
from fl_dpgan.errors import ConfigError, FederationError
from fl_dpgan.runs import RunFolder

GOING = RunStatus(finished=False, completed=False, stopped=False, details="")
DONE = RunStatus(finished=True, completed=True, stopped=False, details="")
STOPPED = RunStatus(finished=True, completed=False, stopped=True, details="")


def failed(details: str) -> RunStatus:
    return RunStatus(finished=True, completed=False, stopped=False, details=details)


class FakeFlower:
    """A SuperLink on which the n-th run started goes through the n-th list of states; None: it does not answer."""

    def __init__(self, *starts: list[RunStatus | None], running: dict[str, RunStatus] | None = None) -> None:
        self.starts, self.begun, self.others = list(starts), [], running or {}
        self.commands: list[tuple[str, ...]] = []

    def __call__(self, home: Path, *arguments: str):
        self.commands.append(arguments)
        if arguments[0] == "run":
            self.begun.append(self.starts.pop(0))
        return {"success": True, "run-id": str(len(self.begun))}

    def all(self):
        found = dict(self.others)
        for number, states in enumerate(self.begun, 1):
            state = states.pop(0) if len(states) > 1 else states[0]
            if state is None:
                return None
            found[str(number)] = state
        return found


@pytest.fixture
def begin(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "_POLL", 0.0)
    server = ServerFolder.create(tmp_path / "s", ["localhost"], port=1, ca_days=1, days=1, classes=["a", "b"])

    def make(flower: FakeFlower, *, restarts: int = 3) -> tuple[FollowedRun, list[str], list[int]]:
        monkeypatch.setattr(follow, "flwr", flower)
        monkeypatch.setattr(follow, "Runs", lambda home: flower)
        notes, rounds = [], []
        run = FollowedRun(
            server, server.path / "federation.toml", tmp_path / "run", tmp_path, restarts,
            lambda record: rounds.append(record["round"]), notes.append,
        )  # fmt: skip
        return run, notes, rounds

    return make


def test_a_run_that_completes_is_started_once_with_the_file_and_the_folder(begin, tmp_path):
    flower = FakeFlower([GOING, GOING, DONE])
    run, notes, _ = begin(flower)
    run.begin()
    run.to_the_end()
    config = f'federation="{tmp_path}/s/federation.toml" out="{tmp_path}/run"'
    assert flower.commands == [("run", str(tmp_path), "federation", "--run-config", config)]
    assert notes == ["run 1 started"]


def test_a_failed_start_is_followed_by_others_but_not_for_ever(begin):
    flower = FakeFlower(*[[failed("FederationError: too few")]] * 3)
    run, notes, _ = begin(flower, restarts=2)
    run.begin()
    with pytest.raises(FederationError, match=r"too few; when that is mended, the same command continues"):
        run.to_the_end()
    assert len(flower.begun) == 3 and "1 more times" in notes[1] and "0 more times" in notes[3]


def test_failures_with_rounds_between_them_are_counted_anew(begin, tmp_path):
    flower = FakeFlower(*[[failed("FederationError: too few")]] * 4)
    run, _, _ = begin(flower, restarts=1)
    folder, begun = RunFolder(tmp_path / "run"), list(flower.starts)
    folder.path.mkdir(exist_ok=True)
    original = run.on_note

    def note(text: str) -> None:
        if "starting again" in text and len(flower.begun) < 3:
            folder.log_round({"round": len(flower.begun), "sites": {}})
        original(text)

    run.on_note = note
    run.begin()
    with pytest.raises(FederationError):
        run.to_the_end()
    assert len(flower.begun) == 4 == len(begun)  # a failure after each of two rounds, and one start more after the last


@pytest.mark.parametrize("kind", ["ConfigError", "RunFolderError", "DataError"])
def test_what_a_new_start_does_not_mend_is_not_tried_again(begin, kind):
    flower = FakeFlower([failed(f"{kind}: batch: too large")])
    run, _, _ = begin(flower)
    run.begin()
    with pytest.raises(ConfigError, match=r"^batch: too large$"):
        run.to_the_end()
    assert len(flower.begun) == 1


def test_a_run_that_was_stopped_is_not_started_again(begin):
    run, _, _ = begin(flower := FakeFlower([GOING, STOPPED]))
    run.begin()
    with pytest.raises(FederationError, match="stopped"):
        run.to_the_end()
    assert len(flower.begun) == 1


def test_a_superlink_that_goes_and_comes_is_waited_for(begin):
    flower = FakeFlower([GOING, None, None, failed("No heartbeat received from the task")], [DONE])
    run, notes, _ = begin(flower)
    run.begin()
    run.to_the_end()
    assert [note.partition(";")[0] for note in notes] == [
        "run 1 started", "the SuperLink does not answer", "the SuperLink is back",
        "No heartbeat received from the task", "run 1 started".replace("1", "2"),
    ]  # fmt: skip


def test_without_a_superlink_nothing_begins(begin):
    flower = FakeFlower()
    flower.all = lambda: None
    with pytest.raises(FederationError, match=r"no SuperLink answers at 127.0.0.1:1; start it with"):
        begin(flower)[0].begin()
    assert flower.commands == []


def test_a_run_that_goes_on_already_is_followed_where_it_is_this_one_and_left_alone_otherwise(begin, tmp_path):
    flower = FakeFlower(running={"9": GOING})
    run, notes, _ = begin(flower)
    with pytest.raises(FederationError, match="run 9 is going on at this SuperLink"):
        run.begin()
    (tmp_path / "s" / "run.json").write_text(json.dumps({"run": "9", "out": str(tmp_path / "run")}))
    run.begin()
    flower.others["9"] = DONE
    run.to_the_end()
    assert flower.commands == [] and notes == ["run 9 is going on already; following it"]
    run.stop()
    assert flower.commands == [("stop", "9", "federation")]


def test_rounds_are_told_once_and_those_of_an_earlier_start_not_again(begin, tmp_path):
    flower = FakeFlower([GOING, DONE])
    run, _, rounds = begin(flower)
    folder = RunFolder.create(tmp_path / "run", load_federation(tmp_path / "s" / "federation.toml"))
    folder.log_round({"round": 1})
    run.begin()
    folder.log_round({"round": 2})
    folder.log_round({"round": 3})
    run.to_the_end()
    assert rounds == [2, 3]


def test_a_run_of_another_description_is_not_continued(tmp_path, begin):
    run, _, _ = begin(FakeFlower())
    federation = load_federation(run.file)
    assert not continues(run.out, federation)
    RunFolder.create(run.out, federation)
    assert continues(run.out, federation)
    text = run.file.read_text()
    run.file.write_text(text.replace("rounds = 30", "rounds = 31"))
    with pytest.raises(ConfigError, match=r"began with another federation\.toml"):
        run.begin()


def test_flowers_words_are_one_line():
    class Status:
        status, sub_status, details = "finished", "failed", "ServerApp failed with exception: ConfigError: a\n  b"

    assert _status(Status) == failed("ConfigError: a b")


def test_the_bundle_comes_from_a_checkout(tmp_path):
    assert checkout(None) == Path(__file__).parents[2]
    with pytest.raises(ConfigError, match=r"no checkout of fl-dpgan.*give the checkout as --app"):
        checkout(tmp_path)
