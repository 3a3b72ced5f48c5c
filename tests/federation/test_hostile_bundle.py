"""A hostile server's code, run at a site as Flower's user, reads no image and no ledger, and gets nothing uncharged."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message, MessageType
from hostile_bundle import ATTEMPTS
from PIL import Image

from fl_dpgan.config import load_federation
from fl_dpgan.federation import relay, wire
from fl_dpgan.networks import from_config
from fl_dpgan.privacy.ledger import Ledger, LedgerReader
from fl_dpgan.privacy.plan import SitePlan
from fl_dpgan.privacy.verify import verify
from fl_dpgan.report.budgets import budget_rows
from fl_dpgan.site_file import load_site

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run the guard and the bundle as users of their own"),
]

HERE = Path(__file__).parent
GUARD, FLOWER, LINK = 54_321, 54_322, 54_323  # users of no name: the guard's and Flower's; and the group of the socket
FEDERATION = """
name = "trial"
classes = ["healthy", "ill"]
address = "localhost:1"
federation = {{ sites = 1, quorum = 1 }}
model = {{ num_classes = 2, latent_dim = 4, g_width = 2, d_width = 2 }}
privacy = {{ batch_size = 4, eps_max = 5.0 }}
training = {{ rounds = 40, d_steps = {d_steps} }}
"""
SITE = """
name = "clinic"
[policy]
declared_size = 40
eps_max = 5.0
eps_per_run = 5.0
[guard]
socket = "run/guard.sock"
"""


class Clinic:
    """A site's folders, as `clients/README.md` lays them out, and its guard under a user of its own."""

    def __init__(self, home: Path, d_steps: int) -> None:
        self.home = home
        home.chmod(0o755)
        (home / "federation.toml").write_text(FEDERATION.format(d_steps=d_steps))
        (home / "site.toml").write_text(SITE)
        source = np.random.default_rng(0)
        for label in ("healthy", "ill"):
            (home / "images" / label).mkdir(parents=True)
            for number in range(20):
                Image.fromarray(source.integers(0, 256, (28, 28), np.uint8)).save(
                    home / "images" / label / f"{number}.png"
                )
        self.site, self.federation = load_site(home / "site.toml"), load_federation(home / "federation.toml")
        Ledger(self.site.ledger, self.site.policy.account("clinic")).close()
        (home / "run").mkdir()
        (home / "cache").mkdir(mode=0o700)
        own(home, GUARD, LINK)
        for path in (home / "images", home / "cache"):
            path.chmod(0o700)
        self.site.ledger.chmod(0o600)
        (home / "run").chmod(0o750)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> int:
        arguments = [str(HERE / "guard_process.py"), str(self.home / "site.toml"), str(GUARD), str(LINK)]
        with (self.home / "guard.log").open("a") as said:
            self.process = subprocess.Popen([sys.executable, *arguments], stdout=said, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 90
        while not self.site.guard.socket.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(self.said())
            time.sleep(0.05)
        return self.process.pid

    def stop(self, how: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(60)

    def said(self) -> str:
        return (self.home / "guard.log").read_text()

    def request(self, number: int) -> tuple[str, bytes]:
        with closing(LedgerReader(self.site.ledger)) as ledger:
            order = ledger.account.order
        plan = self.federation.site_plan(40, order)
        generator, discriminator = from_config(self.federation.model, 0)
        header = wire.Request(run="hostile", round=number, site="clinic", plan=plan)
        return header.model_dump_json(), wire.dump(discriminator=discriminator, generator=generator)

    def charged(self) -> list[str]:
        with closing(LedgerReader(self.site.ledger)) as ledger:
            return [charge.request for charge in ledger.charges()]


def own(folder: Path, user: int, group: int) -> None:
    os.chown(folder, user, group)
    for path in folder.rglob("*"):
        os.chown(path, user, group)


@pytest.fixture
def clinic(request) -> Iterator[Clinic]:
    home = Path(tempfile.mkdtemp(prefix="clinic-"))
    made = Clinic(home, getattr(request, "param", 2))
    try:
        yield made
    finally:
        if made.process and made.process.poll() is None:
            made.process.kill()
            made.process.wait()
        shutil.rmtree(home)


def test_invariant_1_and_4_a_hostile_bundle_reads_nothing_and_gets_nothing_uncharged(clinic):
    guard = clinic.start()
    requests = [clinic.request(number) for number in range(1, 11)]
    weaker = json.loads(requests[0][0])
    weaker["round"], weaker["plan"]["noise_multiplier"] = 11, 1e-6
    beyond = json.loads(requests[0][0])
    beyond["round"], beyond["plan"]["eps_max"] = 12, 50.0
    task = {
        "user": FLOWER, "group": LINK, "guard": guard, "socket": str(clinic.site.guard.socket),
        "files": [str(clinic.site.ledger), str(clinic.home / "images/ill/0.png"), f"{clinic.site.ledger}.guard"],
        "folders": [str(clinic.home / "images"), str(clinic.home / "images/ill"), str(clinic.home / "cache"),
                    str(clinic.home / "run")],
        "requests": [*(header for header, _ in requests), json.dumps(weaker), json.dumps(beyond)],
        "tensors": requests[0][1].hex(),
    }  # fmt: skip
    bundle = subprocess.run(
        [sys.executable, str(HERE / "hostile_bundle.py")], input=json.dumps(task), capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert bundle.returncode == 0, bundle.stderr
    found = json.loads(bundle.stdout)

    run_folder = str(clinic.home / "run")  # the one folder that it sees into: the socket's
    refused = found["files"] | found["written"] | {k: v for k, v in found["folders"].items() if k != run_folder}
    alone = ("memory", "environment", "opened", "traced", "killed", "socket removed", "ledger replaced")
    refused |= {name: found[name] for name in alone}
    assert set(refused.values()) == {"PermissionError"}, refused
    assert "guard.sock" in found["folders"][run_folder]
    assert set(found["rubbish"]) <= {"refused", "full", "ConnectionError", "BrokenPipeError", "ConnectionResetError"}

    answers = [json.loads(answer) for answer in found["answers"] if answer.startswith("{")]
    trained = {answer["head"] for answer in answers if answer["status"] == "trained"}
    rules = {answer["rule"] for answer in answers if answer["status"] in ("refused", "withdrawn")}
    assert len(found["answers"]) == ATTEMPTS and trained, Counter(found["answers"])
    assert {answer["status"] for answer in answers} <= {"trained", "refused", "withdrawn"}
    assert {"eps_per_run", "least_noise_multiplier"} & rules
    charged = clinic.charged()
    assert len(charged) >= len(trained)  # each other noise, each a charge of its own
    with closing(LedgerReader(clinic.site.ledger)) as ledger:
        assert all(ledger.holds(head) for head in trained)
    assert all(name.split("/")[1] in map(str, range(1, 11)) for name in charged)  # none of the weaker plans

    header, _ = relay.ask(clinic.site.guard.socket, "train", *clinic.request(20))  # it is well after all that
    assert wire.parse(header, wire.Answer).status in ("trained", "refused")
    assert clinic.stop(signal.SIGTERM) == 0, clinic.said()
    verify(clinic.site.ledger)


@pytest.mark.parametrize("clinic", [150], indirect=True)
def test_sigterm_within_a_round_finishes_it_and_a_kill_leaves_it_charged(clinic):
    answers = []

    def asked(number: int) -> None:
        message = Message(wire.pack(wire.Question()), dst_node_id=1, message_type=MessageType.TRAIN)
        message.content = wire.pack_parts([clinic.request(number)])
        answers.append(relay.answer(message, clinic.site.guard.socket))

    for number, how in ((1, signal.SIGTERM), (2, signal.SIGKILL)):
        clinic.start()
        thread = threading.Thread(target=asked, args=(number,))
        thread.start()
        deadline = time.monotonic() + 60
        while len(clinic.charged()) < number and time.monotonic() < deadline:
            time.sleep(0.01)
        clinic.stop(how)
        thread.join(60)
        assert len(clinic.charged()) == number
    finished, killed = answers
    assert wire.unpack(finished, wire.Answer)[0].status == "trained"
    assert killed.has_error()
    budget = SitePlan.model_validate(json.loads(clinic.request(2)[0])["plan"])
    spent = budget_rows(clinic.site.ledger)[0]["spent"]
    assert spent == pytest.approx(budget.epsilon_after(2 * 150, 0))  # the round that was killed counts
    verify(clinic.site.ledger)
