"""`truncdet audit` and `truncdet compare`: unmodified scripts, exit codes, JSON and the page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trace_cases as cases
from click.testing import CliRunner

from truncdet._cli import main

SCRIPT = """
import os, sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("arguments", sys.argv[1:])
for step in range(4):
    x = torch.randn(3, 4)
    if "noise" in sys.argv and step == 2:
        x[1, 2] += float(int.from_bytes(os.urandom(4), "little")) / 2**32
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "crash" in sys.argv and step == 2:
        raise KeyError("planted")
    if "alternate" in sys.argv and step == 1 and os.path.exists(sys.argv[2]):
        raise SystemExit(7)
open(sys.argv[2], "w").close() if "alternate" in sys.argv else None
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


class Done(NamedTuple):
    """How a command ended, and all that it and what it ran wrote."""

    returncode: int
    text: str


Audit = Callable[..., Done]


@pytest.fixture
def audit(capfd: pytest.CaptureFixture[str]) -> Audit:
    """The command in this process, which has imported torch already; what it runs has its own."""

    def run(*arguments: object) -> Done:
        capfd.readouterr()
        done = CliRunner().invoke(main, ["audit", *map(str, arguments)])
        out, err = capfd.readouterr()
        return Done(done.exit_code, done.output + out + err)

    return run


def test_an_equal_script_is_equal(script: Path, tmp_path: Path, audit: Audit) -> None:
    verdict, traces = tmp_path / "v.json", tmp_path / "traces"
    done = audit("--json", verdict, "--traces", traces, "--", sys.executable, script, "--flag")
    assert done.returncode == 0, done.text
    assert "arguments ['--flag']" in done.text  # the script's own
    found = json.loads(verdict.read_text())
    assert (found["schema"], found["equal"], found["steps_compared"]) == (1, True, 4)
    # What was kept can be compared again.
    pair = [str(traces / f"run-{number}.trace") for number in range(2)]
    assert CliRunner().invoke(main, ["compare", *pair]).exit_code == 0


def test_a_script_that_differs_is_explained(script: Path, tmp_path: Path, audit: Audit) -> None:
    verdict, report = tmp_path / "v.json", tmp_path / "r.html"
    done = audit("--json", verdict, "--html", report, "--", sys.executable, script, "noise")
    assert done.returncode == 1, done.text
    assert "step 2, data: the batch differs" in done.text
    assert "what helps: seed the sampler and the workers" in done.text
    found = json.loads(verdict.read_text())
    expected = {"step": 2, "phase": "data", "op": "batch", "elements": 1, "first_index": [1, 2]}
    assert {key: found[key] for key in expected} == expected and found["max_ulp"] > 0
    page = report.read_text()
    assert "Different" in page and "seed the sampler" in page


def test_what_cannot_be_told_exits_with_2(script: Path, tmp_path: Path, audit: Audit) -> None:
    done = audit("--", sys.executable, "-c", "print(1)")
    assert done.returncode == 2 and "no training was recorded" in done.text
    done = audit("--", sys.executable, script, "crash")
    assert done.returncode == 2 and "ended with status 1, equal in all 3 steps" in done.text
    done = audit("--", sys.executable, script, "alternate", tmp_path / "mark")
    assert done.returncode == 2 and "ends after 2 steps" in done.text
    done = audit("--", tmp_path / "missing")
    assert done.returncode == 2 and "No such file" in done.text


def test_runs_can_be_cut_short_and_seen_operator_by_operator(
    script: Path, tmp_path: Path, audit: Audit
) -> None:
    verdict = tmp_path / "v.json"
    options = ("--steps", 2, "--level", "op", "--runs", 3, "--json", verdict)
    done = audit(*options, "--", sys.executable, script, "noise")
    assert done.returncode == 0, done.text
    assert json.loads(verdict.read_text())["steps_compared"] == 2


def test_modules_and_a_sitecustomize_of_ones_own_work(script: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('my own')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = ["audit", "--", sys.executable, "-m", "train"]
    done = subprocess.run(
        [sys.executable, "-m", "truncdet", *command],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("my own") == 3  # of the command itself and of both runs


def traces(folder: Path) -> list[str]:
    paths = [folder / f"{number}.trace" for number in range(2)]

    def run(fault: cases.Fault, path: Path) -> None:
        cases.train(cases.network(cases.FaultyBackward(fault)), fault=fault, path=path)

    for number, path in enumerate(paths):
        run(cases.Fault(number), path)
    return [str(path) for path in paths]


def test_compare_exits_with_what_it_found(tmp_path: Path) -> None:
    a, b = traces(tmp_path)
    run = CliRunner().invoke
    assert run(main, ["compare", a, a]).exit_code == 0
    different = run(main, ["compare", a, b])
    assert (
        different.exit_code == 1 and "_BackwardBackward of 3 gives other bits" in different.output
    )
    unreadable = run(main, ["compare", a, __file__])
    assert unreadable.exit_code == 2 and "must be a file that truncdet.record" in unreadable.output
    assert run(main, ["compare", a, str(tmp_path / "none")]).exit_code == 2


class Page(HTMLParser):
    """Checks that tags are balanced and that nothing is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.culprits: list[str] = []
        self.strip: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        values = dict(attrs)
        assert not {"src", "href"} & set(values), values
        if tag not in ("meta", "polyline"):
            self.open.append(tag)
        if "title" in values and tag == "span":
            self.strip.append(values.get("class") or "equal")

    def handle_endtag(self, tag: str) -> None:
        if tag != "polyline":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.get_starttag_text() == '<span class="culprit" id="culprit">':
            self.culprits.append(data)


def a_page(folder: Path) -> str:
    a, b = traces(folder)
    report = folder / "r.html"
    CliRunner().invoke(main, ["compare", a, b, "--html", str(report)])
    return report.read_text()


def test_the_page_is_whole_and_marks_the_culprit(tmp_path: Path) -> None:
    text = a_page(tmp_path)
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.strip == ["equal", "first", "after"]
    assert page.culprits[0] == "_BackwardBackward"
    assert "<polyline" in text and "http" not in text


@pytest.mark.parametrize("browser", ["chromium", "google-chrome", "chromium-browser"])
def test_a_browser_shows_the_page(browser: str, tmp_path: Path) -> None:
    program = shutil.which(browser)
    if program is None:
        pytest.skip(f"{browser} is not installed")
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "r.html").write_text(a_page(tmp_path))
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    done = subprocess.run(
        [*command, f"file://{tmp_path}/page/r.html"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    # What the browser made of it, all parts in their places.
    assert '<h1>Different</h1><p class="verdict different">' in done.stdout, done.stderr
    assert done.stdout.count("<polyline") == 2 and 'id="culprit"' in done.stdout


SPAWNS = """
import os, subprocess, sys
import torch
import torch.multiprocessing as mp

def train(number):
    torch.manual_seed(number)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.ones(3, 2)
        if "noise" in sys.argv and number == 0:
            x += float(int.from_bytes(os.urandom(4), "little")) / 2**32
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    if "spawn" in sys.argv:
        mp.spawn(train, nprocs=2)
    elif "child" in sys.argv:
        train(1)
    else:
        for _ in range(2):
            subprocess.run([sys.executable, __file__, "child"], check=True)
"""


@pytest.mark.parametrize(
    ("how", "expected", "names"),
    [
        (["spawn"], 0, {"run-0.trace.process-1", "run-0.trace.process-2"}),
        (["spawn", "noise"], 1, {"run-0.trace.process-1", "run-0.trace.process-2"}),
        (["commands"], 0, {"run-0.trace", "run-0.trace.again-1"}),
    ],
)
def test_processes_of_no_rank_have_a_trace_each(
    how: list[str], expected: int, names: set[str], tmp_path: Path, audit: Audit
) -> None:
    path, traces = tmp_path / "train.py", tmp_path / "traces"
    path.write_text(SPAWNS)
    done = audit("--no-values", "--traces", traces, "--", sys.executable, path, *how)
    assert done.returncode == expected, done.text
    assert {found.name for found in traces.glob("run-0*")} == names
