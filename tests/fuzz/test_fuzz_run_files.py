"""Whatever lies in a run's folder is read, passed over, or a typed error: a run goes on from it, and people see it."""

import json

import pytest
import torch
from mangle import changed_json, changed_safetensors, mangled, survey
from rich.console import Console

from fl_dpgan.config import Federation
from fl_dpgan.errors import RunFolderError
from fl_dpgan.federation.exchange import SiteRecord
from fl_dpgan.report.synthetic import card
from fl_dpgan.report.watched import overview, page
from fl_dpgan.runs import RunFolder

SETTINGS = Federation(classes=("a", "b"), address="x.org:1", model={"num_classes": 2}, training={"rounds": 3})


@pytest.fixture
def run(federation, tmp_path):
    """A run of two rounds with what was asked after its last checkpoint, as a kill leaves it."""
    described = RunFolder.create(tmp_path / "described", SETTINGS)
    fed = federation(sites=1, rounds=2)
    fed.strategy().start(fed.grid())
    (described.path / "scenario.json").rename(fed.path / "scenario.json")
    folder = RunFolder(fed.path)
    folder.note_asked("discriminator_update", folder.load_checkpoint()[1]["sites"])
    return fed, folder


def test_a_malformed_checkpoint_is_continued_and_shown_or_refused(run, thorough, monkeypatch):
    fed, folder = run
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # thousands of them would take minutes
    file = folder.path / "checkpoint.safetensors"
    whole = file.read_bytes()

    def make(random):
        if random.random() < 0.5:
            return changed_safetensors(random, [whole])
        length = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + length])
        meta = json.loads(header["__metadata__"]["fl_dpgan"])
        header["__metadata__"]["fl_dpgan"] = changed_json(random, meta).decode("utf-8", "replace")
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + length :]

    def parse(content):
        file.write_bytes(content)
        card(folder, folder.checkpoint_meta())
        strategy = fed.strategy()
        for parameter in strategy._trainer.generator.parameters():
            parameter.grad = torch.zeros_like(parameter)
        strategy._trainer.optimizer.step()  # its state fits its parameters
        for memory in strategy._roster.memory.values():
            assert SiteRecord.recalled(0, memory).epsilon >= 0

    parse(whole)
    tally = survey(parse, make, thorough)
    assert tally["read"] and set(tally) == {"read", "RunFolderError"}


def test_malformed_notes_of_what_was_asked_are_counted_or_refused(run, thorough):
    _, folder = run
    file = folder.path / "asked.json"
    asked = json.loads(file.read_bytes())

    def parse(content):
        file.write_bytes(content)
        for mechanism, sites in folder.asked():
            for memory in sites.values():
                record = SiteRecord.recalled(0, memory)
                record.count(mechanism)
                assert record.epsilon >= 0

    parse(json.dumps(asked).encode())
    tally = survey(parse, lambda random: changed_json(random, asked), thorough)
    assert tally["read"] and set(tally) == {"read", "RunFolderError"}


def test_a_malformed_round_log_is_shown_without_the_lines_that_are_none(run, thorough):
    _, folder = run
    file, console = folder.path / "rounds.jsonl", Console(quiet=True)
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    counted = {"accuracy": 0.5, "outcomes": {"a": {"status": "counted"}}}
    more = {"round": 2, "not_joined": ["x"], "stopped": "why", "evaluation": counted}

    def make(random):
        raw = [changed_json(random, random.choice([*lines, more])), json.dumps(lines[0]).encode()]
        data = b"\n".join(raw) + b"\n"
        return mangled(random, [data], head=len(data)) if random.random() < 0.3 else data

    def parse(content):
        file.write_bytes(content)
        console.print(page(overview(folder)))
        if len(list(folder.rounds())) < 2:
            raise RunFolderError("a line was passed over")

    tally = survey(parse, make, thorough)
    assert tally["read"] and set(tally) == {"read", "RunFolderError"}


def test_a_malformed_description_of_a_run_is_read_or_refused(run, thorough):
    _, folder = run
    file = folder.path / "scenario.json"
    stored = json.loads(file.read_bytes())

    def parse(content):
        file.write_bytes(content)
        assert folder.settings.name and isinstance(folder.run, str)

    parse(json.dumps(stored).encode())
    tally = survey(parse, lambda random: changed_json(random, stored), thorough)
    assert tally["read"] and set(tally) == {"read", "RunFolderError", "ConfigError"}
