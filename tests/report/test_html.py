"""The report: what stands in it, that nothing in it comes from or goes to outside, and that a browser opens it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from fl_dpgan.report.figures import MOST_GRIDS, MOST_LINES, clipping_figure, epsilon_figure
from fl_dpgan.report.html import Grid, RunView, render, write_report
from fl_dpgan.runs import RunFolder

HOSTILE = '</script><script>console.error("ran")</script>'
IMAGE = "<img src=x onerror=console.error(1)>"


def row(site: str, **changes) -> dict:
    return {
        "site": site, "budget": "default", "unit": "image", "relation": "add/remove one", "declared_size": 6000,
        "spent": 3.1234567890123, "remaining": 6.8765432109877, "eps_max": 10.0, "delta": 1e-05, "order": 3.0,
        "run": "run-a", "run_spent": 2.1234567890123, "share": 5.0, "events": 2, "d_steps": 10, "releases_unknown": 0,
        "sigma": 0.6456375122070312, "q": 0.021333333333333333, "c": 0.5013061581358184, "rounds_left": 7,
        "head": "9f" * 32, **changes,
    }  # fmt: skip


def record(number: int, sites: dict[str, dict], **more) -> dict:
    filled = {
        site: {"epsilon": number / 10, "d_steps": 5 * number, "status": "trained", **o} for site, o in sites.items()
    }
    return {"round": number, "seconds": 1.0, "g_loss": 0.7, "sites": filled, **more}


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, text outside scripts, and the budgets' figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.shown: dict[tuple, str] = {}
        self.words, self.styles, self.open = [], "", ""
        self.feed(text)
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open = tag

    def handle_endtag(self, tag):
        self.open = ""

    def handle_data(self, data):
        if self.open == "style":
            self.styles += data
        elif self.open != "script":
            self.words.append(data)
            attrs = self.tags[-1][1] if self.tags else {}
            if self.open and "data-site" in attrs:
                self.shown[attrs["data-site"], attrs["data-field"]] = data

    @property
    def rows(self) -> list[dict]:
        """The JSON rows, read back off the page."""
        found: dict[tuple, dict] = {}
        for _, attrs in self.tags:
            if attrs.get("data-value") and "data-site" in attrs:
                key = (attrs["data-site"], attrs["data-budget"])
                found.setdefault(key, {})[attrs["data-field"]] = json.loads(attrs["data-value"])
        return list(found.values())

    def outward(self) -> list[tuple[str, str]]:
        """Attributes that would load from, or lead to, outside the page."""
        names = ("src", "href", "xlink:href", "srcset", "action", "data", "poster", "background")
        found = [(tag, str(attrs[name])) for tag, attrs in self.tags for name in names if name in attrs]
        return [(tag, target) for tag, target in found if not target.startswith(("#", "data:"))]

    def headings(self) -> list[int]:
        return [int(tag[1]) for tag, _ in self.tags if re.fullmatch("h[1-6]", tag)]


def full_view(**changes) -> RunView:
    sites = ["site-0", "site-1"]
    return RunView(**{
        "name": "a run", "rows": [row("site-0"), row("site-1", unit="patient", spent=3.2, sigma=None)],
        "rounds": [record(n, {s: {} for s in sites}, evaluation={"accuracy": 0.5, "noise_sd": 0.01}) for n in (1, 2)],
        "scenario": {"seed": 7, "name": "demo", "privacy": {"eps_max": 10.0, "clipping": {"rule": "fixed", "c": None}}},
        "versions": {"torch": "2.14.1"}, "curves": {s: [(1.0, 1.4, 1), (1.1, 1.3, 2)] for s in sites},
        "evaluation": {"cnn_accuracy": 0.5948, "round": 2, "synthetic_images": 10_000, "real_test_images": 624},
        "grids": [Grid("Round 1", b"\x89PNG one")], **changes,
    })  # fmt: skip


def test_figures_on_the_page_are_the_json_rows_exactly():
    rows = [row("site-0"), row("site-0", budget="study-2", spent=0.1 + 0.2, head=None), row("site-1", added_later=[1])]
    page = Page(render(full_view(rows=rows)))
    assert json.dumps(page.rows, sort_keys=True) == json.dumps(rows, sort_keys=True)  # 1 is not 1.0 here


def test_displayed_epsilons_never_flatter():
    page = Page(render(full_view(rows=[row("site-0", spent=9.99993402, remaining=6.598e-05, run_spent=0.3)])))
    shown = {field: page.shown["site-0", field] for field in ("spent", "remaining", "run_spent", "delta", "sigma")}
    assert shown == {
        "spent": "10.0000", "remaining": "0.0000", "run_spent": "0.3000", "delta": "0.00001", "sigma": "0.6456"
    }  # fmt: skip


def test_guarantee_comes_first_and_in_words():
    text = Page(render(full_view())).text
    order = (
        "This run was a simulation", "What is protected: one image.", "What is protected: one patient",
        "What ε means.", "What is covered", "What is not covered", "What each site has spent", "The course of the run",
    )  # fmt: skip
    positions = [text.index(words, text.index("The guarantee in plain words")) for words in order]
    assert positions == sorted(positions)
    assert "seed (7)" in text and "weak against a strong attacker" in text and "sum of their budgets" in text
    assert "Timing is not protected" in text and "declared size and whether it takes part are public" in text


def test_a_deployment_is_not_called_a_simulation():
    assert "This run was a simulation" not in render(full_view(simulated=False))


@pytest.mark.parametrize(
    "epsilon, factor, certainty",
    [(0.0, "1.0", "50.0 %"), (1.0, "2.8", "73.2 %"), (10.0, "22,027", "over 99.9 %"), (900.0, "over 10^390", "99.9")],
)
def test_epsilon_is_translated_upwards(epsilon, factor, certainty):
    text = Page(render(full_view(rows=[row("site-0", spent=epsilon, eps_max=1000.0)]))).text
    assert factor in text and certainty in text


def test_everything_from_outside_is_escaped():
    hostile = full_view(
        name=HOSTILE,
        rows=[row(HOSTILE, budget=IMAGE, run=IMAGE)],
        rounds=[
            record(1, {HOSTILE: {"status": "failed", "reason": IMAGE, "rule": HOSTILE}, IMAGE: {}}),
            {"round": 1, "not_joined": [IMAGE]},
            {"round": 1, "stopped": HOSTILE, "sites": {}},
        ],
        curves={HOSTILE: [(1.0, 1.4, 1)]},
        scenario={"name": HOSTILE, HOSTILE: {IMAGE: IMAGE}},
        versions={IMAGE: HOSTILE},
        grids=[Grid(IMAGE, b"png")],
    )
    text = render(hostile)
    page = Page(text)
    assert HOSTILE not in text and IMAGE not in text
    assert IMAGE in page.text and HOSTILE in page.text  # shown, as text
    # plotly.js and one script per figure
    assert [tag for tag, _ in page.tags].count("script") == 1 + 2
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]


def test_markup_in_a_site_name_is_text_in_the_figures():
    drawn = clipping_figure({'<a href="https://example.org">x</a>': [(1.0, 1.4, 1), (1.1, None, 1)]})
    assert drawn is not None and drawn.figure.data[0].y == (1.4,)
    assert drawn.figure.data[0].name.startswith("&lt;a href=")


def test_nothing_is_loaded_from_outside():
    page = Page(render(full_view()))
    assert page.outward() == []
    assert "url(" not in page.styles and "@import" not in page.styles
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'") and "http" not in policy


def test_the_page_is_sound():
    text = render(full_view())
    page = Page(text)
    levels = page.headings()
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    assert ("html", {"lang": "en"}) in page.tags and "<title>Privacy report of run a run</title>" in text
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    named = {a["aria-labelledby"] for _, a in page.tags if "aria-labelledby" in a}
    links = {a["href"][1:] for t, a in page.tags if t == "a"}
    assert named | links <= set(ids)
    assert all(a.get("alt") for t, a in page.tags if t == "img")
    assert len([1 for _, a in page.tags if a.get("role") == "img" and a.get("aria-label")]) == 3
    assert "privacy.clipping.rule" not in page.text and "clipping.rule fixed" in page.text and "not set" in page.text


def test_missing_parts_are_named():
    text = render(RunView(name="new"))
    page = Page(text)
    for words in (
        "No site's budget is known yet", "No round has been finished yet", "holds no ledgers", "has not been evaluated",
        "left no sample images", "none so far", "The run's folder does not say",
    ):  # fmt: skip
        assert words in page.text
    assert len(text) < 50_000  # and plotly is left out where no figure needs it
    no_ledgers = Page(render(full_view(curves={}))).text
    assert "holds no ledgers" in no_ledgers and "each site keeps its own" in no_ledgers
    assert "hold no event yet" in Page(render(full_view(curves={"site-0": []}))).text
    assert "every site trained in every round" in Page(render(full_view())).text


def test_refusals_and_drop_outs_are_joined_over_rounds():
    refused = {"status": "refused", "rule": "max_rounds", "reason": "too many"}
    rounds = [
        {"round": 0, "not_joined": ["no answer from a node"]},
        record(1, {"site-2": {}, "site-10": refused}),
        record(2, {"site-2": {"status": "withdrawn", "reason": "budget used up"}, "site-10": refused}),
        record(
            3,
            {"site-2": {"status": "withdrawn"}, "site-10": {}},
            evaluation={
                "outcomes": {
                    "site-2": {"status": "counted"},
                    "site-10": {"status": "refused", "rule": "mechanisms", "reason": "no count"},
                }
            },
        ),
        record(4, {"site-2": {"status": "withdrawn"}, "site-10": refused}),
        {"round": 5, "stopped": "too few sites", "sites": {"site-2": {"status": "withdrawn"}}},
    ]
    text = Page(render(full_view(rounds=rounds))).text
    part = text[text.index("Each time a site") : text.index("Settings The scenario")]
    wanted = (
        "0 – – not joined – no answer from a node",
        "1 to 2 site-10 training refused max_rounds too many",
        "2 to 5 site-2 training withdrawn – budget used up",
        "3 site-10 evaluation refused mechanisms no count",
        "4 site-10 training refused max_rounds too many",
        "5 – – run stopped – too few sites",
    )
    assert [words in re.sub(r"\s+", " ", part) for words in wanted] == [True] * 6
    assert "silent" not in part  # only what occurred is explained


def test_equal_curves_share_a_line_and_many_become_a_band():
    same = epsilon_figure([record(n, {f"site-{i}": {} for i in range(1000)}) for n in (1, 2)], [row("site-0")])
    assert same is not None and [trace.name for trace in same.figure.data] == ["site-0 and 999 more", "share: 5"]

    different = {f"site-{i}": {"epsilon": i / 1000} for i in range(1000)}
    band = epsilon_figure([record(n, different) for n in (1, 2)], [])
    assert band is not None and [trace.name for trace in band.figure.data] == [
        "smallest", "smallest to largest", "median"
    ]  # fmt: skip
    assert [trace.y[0] for trace in band.figure.data] == [0.0, 0.999, 0.4995]
    assert "median" in band.caption and "1,000 sites" in band.caption

    chosen = clipping_figure({f"site-{i}": [(1 + i / 1000, 1.0, 1)] for i in range(1000)})
    assert chosen is not None and len(chosen.figure.data) == MOST_LINES
    assert (chosen.figure.data[0].name, chosen.figure.data[-1].name) == ("site-0", "site-999")


def run_folder(path: Path, rounds: list[dict]) -> RunFolder:
    path.mkdir()
    (path / "scenario.json").write_text(json.dumps({"scenario": {"name": "demo"}, "versions": {"numpy": "2.4"}}))
    (path / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
    return RunFolder.open(path)


def test_the_report_gathers_the_runs_folder(tmp_path):
    folder = run_folder(tmp_path / "my-run", [record(1, {"site-0": {"reason": "\ud800", "status": "failed"}})])
    (folder.path / "samples").mkdir()
    for number in range(1, 31):
        (folder.path / "samples" / f"round-{number:04d}.png").write_bytes(b"%d" % number)
    (folder.path / "samples.png").write_bytes(b"30")
    (folder.path / "evaluation.json").write_text(json.dumps(full_view().evaluation))
    path = write_report(folder, [row("site-0")], {})
    assert path == folder.path / "report.html" and not list(folder.path.glob("*.partial"))
    page = Page(path.read_text(encoding="utf-8"))
    alts = [a["alt"].split(": ")[1] for t, a in page.tags if t == "img"]
    assert len(alts) == MOST_GRIDS and (alts[0], alts[-1]) == ("Round 1", "Round 30")
    assert "24 further rounds" in page.text and "run my-run" in page.text and "0.5948" in page.text
    assert "This run was a simulation" in page.text  # unless the caller knows better


def test_a_final_grid_of_its_own_is_shown_too(tmp_path):
    folder = run_folder(tmp_path / "run", [])
    (folder.path / "samples.png").write_bytes(b"final")
    assert "End of the run" in write_report(folder, [], {}).read_text(encoding="utf-8")


CHROMIUM = shutil.which("chromium")


def dump_dom(path: Path, profile: Path) -> tuple[str, list[str]]:
    """The page after its scripts have run, and what it wrote to the console; no name resolves."""
    result = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
            "--virtual-time-budget=10000", "--enable-logging=stderr", "--v=0", "--window-size=1200,900",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    errors = result.stderr.decode(errors="replace")
    assert result.returncode == 0, errors
    return result.stdout.decode(), [line for line in errors.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on PATH (Debian's package; .ci/run installs it)")
def test_a_browser_opens_it_and_shows_the_json_rows(tmp_path):
    rows = [row("site-0"), row(HOSTILE, spent=0.1 + 0.2, sigma=None), row("site-2", unit="patient", delta=1e-7)]
    sites = {"site-0": {}, HOSTILE: {"status": "failed", "reason": IMAGE}, "site-2": {"epsilon": 1.5}}
    rounds = [record(n, sites, evaluation={"accuracy": 0.5, "noise_sd": 0.01}) for n in (1, 2, 3)]
    curves = {site: [(1.0, 1.4, 1), (1.1, 1.3, 2)] for site in sites}
    path = write_report(run_folder(tmp_path / "run", rounds), rows, curves)
    dom, console = dump_dom(path, tmp_path / "profile")
    assert console == []
    page = Page(dom)
    assert page.outward() == []
    assert json.dumps(page.rows, sort_keys=True) == json.dumps(rows, sort_keys=True)
    drawn: dict[str, list[str]] = {}
    figure = ""
    for _, attrs in page.tags:
        figure = attrs["id"] if (attrs.get("id") or "").startswith("figure-") else figure
        drawn.setdefault(figure, []).extend((attrs.get("class") or "").split())
    for key in ("figure-epsilon", "figure-clipping", "figure-accuracy"):
        assert "main-svg" in drawn[key] and "js-line" in drawn[key], key


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on PATH (Debian's package; .ci/run installs it)")
def test_the_browser_test_would_see_an_error_and_a_load(tmp_path):
    page = write_report(run_folder(tmp_path / "run", []), [], {})
    bad = '<script>console.error("seen")</script><img src="https://example.org/x.png">'
    page.write_text(page.read_text(encoding="utf-8").replace("</main>", f"{bad}</main>"), encoding="utf-8")
    _, console = dump_dom(page, tmp_path / "profile")
    assert any("seen" in line for line in console)
    assert any("Content Security Policy" in line for line in console)  # the page itself forbids the load


def test_a_run_without_noise_says_that_nothing_is_guaranteed_and_promises_nothing():
    page = render(RunView("run", scenario={"privacy": {"non_private": True}}))
    assert "There is no guarantee." in page
    assert "The guarantee says how little" not in page and "They carry the guarantee" not in page
