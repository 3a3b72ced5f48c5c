"""A site from its files: what is not in order at the site is said in one line, before anything joins."""

import tomllib

import numpy as np
import pytest
from flwr.app import MessageType
from PIL import Image

from fl_dpgan.config import Federation, parse_scenario, validated
from fl_dpgan.errors import FlDpganError
from fl_dpgan.federation import wire
from fl_dpgan.federation.deployment import make_guard, open_site, question, serve
from fl_dpgan.privacy.ledger import Ledger
from fl_dpgan.runs import RunFolder
from fl_dpgan.site_file import load_site
from tests.conftest import LocalGrid, handler

FEDERATION = """
name = "trial"
classes = ["healthy", "ill"]
address = "localhost:1"
federation = { sites = 1, quorum = 1 }
model = { num_classes = 2, latent_dim = 4, g_width = 2, d_width = 2 }
"""
SITE = 'name = "clinic"\n[policy]\ndeclared_size = 20\n{policy}[data]\n{data}[guard]\nsocket = "guard.sock"\n'


def clinic(home, *, policy="", data="", labels=("healthy", "ill"), federation=FEDERATION, ledger=True):
    (home / "federation.toml").write_text(federation)
    (home / "site.toml").write_text(SITE.format(policy=policy, data=data))
    for label in labels:
        (home / "images" / label).mkdir(parents=True)
        for number in range(20 // len(labels)):
            Image.fromarray(np.full((28, 28), number, np.uint8)).save(home / "images" / label / f"{number}.png")
    file = load_site(home / "site.toml")
    if ledger:
        Ledger(file.ledger, file.policy.account(file.name)).close()
    return file


def test_a_site_in_order_is_opened_with_its_images(tmp_path):
    told = []
    site, images = open_site(clinic(tmp_path), lambda done, total: told.append((done, total)))
    assert images.images.shape == (20, 1, 28, 28) and sorted(images.labels.tolist()) == [0] * 10 + [1] * 10
    assert site.introduction().site == "clinic" and told[-1] == (20, 20)
    guard = make_guard(load_site(tmp_path / "site.toml"), site)
    guard.stop()
    guard.serve()


def test_a_ledger_under_two_names_has_one_guard(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    file = clinic(tmp_path / "one")
    site, _ = open_site(file, lambda done, total: None)
    (tmp_path / "two" / "link.sqlite").symlink_to(file.ledger)
    other = file.model_copy(
        update={
            "ledger": tmp_path / "two" / "link.sqlite",
            "guard": file.guard.model_copy(update={"socket": tmp_path / "two" / "g.sock"}),
        }
    )
    guard = make_guard(file, site)
    with pytest.raises(FlDpganError, match="another guard serves this ledger"):
        make_guard(other, site)
    guard.stop()
    guard.serve()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ledger": False}, "fl-dpgan site ledger"),
        ({"labels": ("healthy",)}, "no image of ill"),
        ({"labels": ("healthy", "unwell")}, "unwell"),
        ({"policy": 'unit = "patient"\n'}, "no patient ids"),
        ({"federation": FEDERATION.replace('"healthy", "ill"', '"healthy"')}, "num_classes = 2, but classes has 1"),
        ({"federation": FEDERATION + "colour = 1\n"}, "unknown key 'colour'"),
        ({"data": 'path = "elsewhere"\n'}, "elsewhere"),
    ],
)
def test_a_site_that_is_not_in_order_says_so_in_one_line(tmp_path, changes, reason):
    with pytest.raises(FlDpganError) as caught:
        open_site(clinic(tmp_path, **changes), lambda done, total: None)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_class_may_be_allowed(tmp_path):
    file = clinic(tmp_path, labels=("healthy",), data="allow_missing_classes = true\n")
    _, images = open_site(file, lambda done, total: None)
    assert set(images.labels.tolist()) == {0}


def test_a_missing_federation_file_says_whom_to_ask(tmp_path):
    file = clinic(tmp_path)
    (tmp_path / "federation.toml").unlink()
    with pytest.raises(FlDpganError, match="ask the coordinator"):
        open_site(file, lambda done, total: None)


def test_a_simulations_folder_is_not_served_as_a_federation_of_real_sites(tmp_path):
    folder = RunFolder.create(tmp_path / "run", parse_scenario({"name": "digits"}))
    with pytest.raises(FlDpganError, match="holds a simulation"):
        serve(folder, LocalGrid({}), dict)


def test_a_federation_of_gradients_whose_plan_takes_several_steps_a_round_is_not_served(tmp_path):
    plan = validated(Federation, tomllib.loads(FEDERATION) | {"privacy": {"update": "image_gradient"}}, tmp_path)
    with pytest.raises(FlDpganError, match="one G step a round"):
        serve(RunFolder.create(tmp_path / "run", plan), LocalGrid({}), dict)


def test_a_federation_is_served_with_its_own_question_and_its_registered_sites_alone(tmp_path):
    privacy = "privacy = { batch_size = 4, evaluation_noise = 2.0, evaluation_every = 1 }\n"
    training = "training = { rounds = 2, d_steps = 1, g_steps = 1, g_batch_size = 4 }\n"
    text = FEDERATION + privacy + training + "evaluation = { images = 100, epochs = 1 }\n"
    both = 'mechanisms = ["discriminator_update", "evaluation_count"]\n'
    site, _ = open_site(clinic(tmp_path, federation=text, policy=both), lambda done, total: None)
    plan = validated(Federation, tomllib.loads(text), tmp_path)
    folder = RunFolder.create(tmp_path / "run", plan)
    asked, answers = [], handler(site)

    def answer(message):
        if message.metadata.message_type == MessageType.QUERY:
            asked.append(wire.unpack(message, wire.Question)[0])
        return answers(message)

    serve(folder, LocalGrid({5: answer, 6: answer}), lambda: {"clinic": 6})
    assert set(asked) == {question(plan)}
    rounds = [record for record in folder.rounds() if record.get("sites")]
    assert {record["sites"]["clinic"]["status"] for record in rounds} == {"trained"}
    assert "not registered" in str([record.get("not_joined") for record in folder.rounds()])
