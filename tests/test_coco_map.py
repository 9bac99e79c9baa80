"""experiments/coco_map.py around its runs: plans, processes, conditions, result, resuming."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments"

sys.path.append(str(EXPERIMENTS))
coco_map: Any = importlib.import_module("coco_map")
children: Any = importlib.import_module("_coco_children")
experiment: Any = importlib.import_module("_coco_experiment")
report: Any = importlib.import_module("_coco_report")
render: Any = importlib.import_module("_render")
tables: Any = importlib.import_module("tables")

FAKE = Path(__file__).with_name("coco_fake_run.py")
TINY = ("--device", "cpu", "--size", "tiny", "--steps", "6")
NAME = "coco_map_torchvision_faster_rcnn"

Command = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs the program on fake runs with these faults: its exit code and its result."""
    monkeypatch.setattr(children, "PROGRAM", FAKE)
    monkeypatch.setattr(children, "POLL_S", 0.01)

    def run(*arguments: str, faults: str = "", name: str = NAME, full: bool = False) -> Any:
        monkeypatch.setenv("TRUNCDET_FAKE", faults)
        if full:  # on a CPU, as if it were a GPU
            monkeypatch.setattr(coco_map, "pick_device", lambda *_: torch.device("cuda"))
            monkeypatch.setattr(experiment, "describe", lambda *_: head())
        code = coco_map.main([*TINY, *arguments, "--out", str(tmp_path)])
        path = tmp_path / f"{name}.json"
        return code, json.loads(path.read_text()) if path.exists() else {}

    return run


def head() -> dict[str, Any]:
    found = {"schema": 1, "commit": None, "dirty": None, "device": "GPU X", "versions": {}}
    return {**found, "command": "python experiments/coco_map.py"}


def missed(result: dict[str, Any]) -> list[str]:
    return [check["name"] for check in result["checks"] if not check["passed"]]


FULL = ("--size", "full", "--data", "bccd_tiny", "--image-size", "96")


def test_every_mode_seed_and_repeat_is_run_and_reported(command: Command, tmp_path: Path) -> None:
    code, result = command(
        "--seeds", "0,1,2", "--repeats", "2,1,1", "--jobs", "3", *FULL, full=True
    )
    assert code == 0, missed(result)
    assert result["complete"] and result["schema"] == 1 and result["experiment"] == "coco_map"
    assert [(r["seed"], r["repeat"], r["mode"]) for r in result["runs"]] == [
        (seed, repeat, mode)
        for seed, repeat in ((0, 0), (0, 1), (1, 0), (2, 0))
        for mode in ("off", "fixed_point", "truncate")
    ]
    assert all(len(run["losses"]) == len(run["loss_digests"]) == 6 for run in result["runs"])
    plain, ours = (result["modes"][mode] for mode in ("off", "fixed_point"))
    assert ours["seeds"]["0"]["spread"] == {"bbox": 0.0}
    assert ours["seeds"]["0"]["first_difference"] is None
    assert set(ours["seeds"]["0"]["equal"].values()) == {True}
    assert plain["seeds"]["0"]["spread"]["bbox"] > 0
    assert plain["seeds"]["0"]["first_difference"] == 1
    assert plain["seeds"]["1"]["equal"] is None and plain["seeds"]["1"]["spread"]["bbox"] is None
    assert ours["mean_ap"]["bbox"]["n"] == 3 and ours["peak_bytes"] == 102 << 20
    # Several at once: the times are those of the runs alone.
    assert result["timing"]["apart"] and result["timing"]["ms_per_step"]["fixed_point"] == 9.0
    assert result["versions"]["fake"] == "1" and result["recipe"] == "none"
    assert result["data"]["train"]["images"] == 8 and len(result["data"]["val"]["sha256"]) == 64
    assert "truncate: mean bbox AP overlaps with off" in [c["name"] for c in result["checks"]]
    assert result["picture"] == f"{NAME}.png" and (tmp_path / f"{NAME}.png").stat().st_size > 5000
    assert not list(tmp_path.glob("*.runs"))  # nothing is left to resume
    assert str(tmp_path) not in json.dumps(result) and str(ROOT) not in json.dumps(result)


@pytest.mark.parametrize(
    ("faults", "names"),
    [
        ("nan", ["all losses finite"]),
        ("start", ["equal seeds start with equal weights"]),
        ("own", ["AP from the framework's evaluator"]),
        ("equal", ["off, seed 0: runs differ", "off, seed 0: AP differs"]),
        (
            "noise",
            [
                *(
                    f"fixed_point, seed 0: {part} repeat"
                    for part in ("losses", "weights", "optimizer", "detections")
                ),
                "fixed_point, seed 0: bbox AP spread is 0",
            ],
        ),
        ("fail:truncate", ["truncate-seed0-run0: ran", "truncate-seed0-run1: ran"]),
    ],
)
def test_a_fault_is_a_missed_condition(
    command: Command, faults: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = command(*FULL, faults=faults, full=True)
    assert code == 1 and missed(result) == names
    out = capsys.readouterr().out
    assert f"MISSED {names[0]}" in out
    if faults.startswith("fail"):
        assert not result["complete"] and "RuntimeError: broken" in out
        assert result["failures"]["truncate-seed0-run0"] == "exit status 1: RuntimeError: broken"
        assert len(result["runs"]) == 4 and "picture" not in result


def test_plain_runs_need_not_differ_on_a_cpu(command: Command) -> None:
    code, result = command(faults="equal")
    assert code == 0 and not result["timing"]["apart"]
    assert result["timing"]["ms_per_step"] == {"off": 10.0, "fixed_point": 9.0, "truncate": 12.0}


def test_mask_models_have_both_kinds_of_ap(command: Command) -> None:
    _, result = command("--model", "mask_rcnn", name="coco_map_torchvision_mask_rcnn")
    assert result["iou_types"] == ["bbox", "segm"] and result["data"]["name"] == "nuclei_tiny"
    assert result["modes"]["fixed_point"]["seeds"]["0"]["spread"] == {"bbox": 0.0, "segm": 0.0}
    text = render.region("coco_map", {"x.json": result})
    assert "| segm " in text and "first difference" in text


def test_the_precision_is_part_of_the_file_name(command: Command) -> None:
    _, result = command("--amp", "float16", name=f"{NAME}_float16")
    assert result["training"]["amp"] == "float16"


def start(folder: Path, *arguments: str, faults: str = "") -> subprocess.Popen[str]:
    """The program as a user starts it, with fake runs."""
    code = (
        f"import sys; sys.path[:0] = [{str(EXPERIMENTS)!r}]; import _coco_children, coco_map; "
        f"from pathlib import Path; _coco_children.PROGRAM = Path({str(FAKE)!r}); "
        "sys.exit(coco_map.main(sys.argv[1:]))"
    )
    line = [sys.executable, "-c", code, *TINY, *arguments, "--out", str(folder)]
    environment = {**os.environ, "TRUNCDET_FAKE": faults}
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True)


def test_an_interrupted_command_goes_on_where_it_was(tmp_path: Path, command: Command) -> None:
    process = start(tmp_path, faults="wait:truncate")
    work = tmp_path / f"{NAME}.runs"
    waits = work / "truncate-seed0-run0" / "waits"
    until = time.monotonic() + 120
    while not waits.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, out
    assert "--resume goes on" in out and not waits.exists()  # the child was ended in order
    partial = json.loads((tmp_path / f"{NAME}.json").read_text())
    assert not partial["complete"] and len(partial["runs"]) == 2
    kept = work / "off-seed0-run0" / "run.json"
    before = kept.stat().st_mtime_ns, json.loads(kept.read_text())
    with pytest.raises(SystemExit, match=r"^--resume: must be given to go on"):
        command()
    with pytest.raises(SystemExit, match=r"same run, got another steps \(6, wanted 7\)"):
        command("--resume", "--steps", "7")
    assert before == (kept.stat().st_mtime_ns, json.loads(kept.read_text()))
    code, result = command("--resume")
    assert code == 0 and result["complete"] and len(result["runs"]) == 6
    assert result["runs"][0]["losses"] == before[1]["losses"]
    assert "--resume" not in result["command"]


def test_folders_of_others_are_left_alone(tmp_path: Path, command: Command) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "precious").touch()
    for resume in ((), ("--resume",)):
        with pytest.raises(SystemExit, match="--resume"):
            command("--work", str(work), *resume)
    assert [path.name for path in work.iterdir()] == ["precious"]


def test_a_run_of_another_commit_is_not_kept(command: Command, tmp_path: Path) -> None:
    command(faults="fail:truncate")
    path = tmp_path / f"{NAME}.runs" / "off-seed0-run0" / "spec.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "origin": {**content["origin"], "commit": "other"}}))
    with pytest.raises(SystemExit, match=r"got another commit \(other, wanted"):
        command("--resume")


def test_the_budget_cuts_the_steps_and_the_result_says_so(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--steps", "1000", "--modes", "off,fixed_point")
    # A step takes 0.01 s and the rest of a run 1 - 12 * 0.01 s; four runs.
    code, result = command(*arguments, "--budget", "1000")
    assert code == 0 and result["steps"] == result["requested_steps"] == 1000
    code, result = command(*arguments, "--budget", "24")
    assert result["requested_steps"] == 1000 and 300 < result["steps"] < 600
    assert {len(run["losses"]) for run in result["runs"]} == {result["steps"]}


def test_a_resumed_command_keeps_the_steps_that_its_budget_gave(command: Command) -> None:
    arguments = ("--steps", "1000", "--budget", "24")
    _, partial = command(*arguments, faults="fail:truncate")
    code, result = command(*arguments, "--resume")
    assert code == 0 and result["steps"] == partial["steps"] < 1000


def test_evaluation_alone_is_compared_plain_and_with_ties(command: Command) -> None:
    name = NAME.replace("map", "evaluate")
    code, result = command("--only-evaluate", "--modes", "off,fixed_point", name=name)
    assert code == 0 and result["experiment"] == "coco_evaluate" and result["complete"]
    groups = [(g["mode"], g["ties"], g["runs"], g["tied_scores"]) for g in result["groups"]]
    assert groups == [(m, t, 3, 60 * t) for m in ("off", "fixed_point") for t in (False, True)]
    assert "60 of 100" in render.region("coco_evaluate", {"x.json": result})


@pytest.mark.parametrize(
    ("faults", "names"),
    [
        ("noise", ["AP repeats", "detections repeat"]),
        ("untied", ["most scores are tied"]),
    ],
)
def test_evaluations_that_differ_are_missed(
    command: Command, faults: str, names: list[str]
) -> None:
    name = NAME.replace("map", "evaluate")
    arguments = ("--only-evaluate", "--modes", "truncate")
    code, result = command(*arguments, faults=faults, name=name)
    assert code == 1
    assert missed(result) == [f"truncate, tied scores: {text}" for text in names]


@pytest.mark.parametrize("faults", ["", "forget"])
def test_a_stopped_run_is_compared_with_one_that_was_not(command: Command, faults: str) -> None:
    name = NAME.replace("map", "resume")
    code, result = command("--stop-and-resume", faults=faults, name=name)
    found = result["comparisons"]["fixed_point"]
    assert found["stopped_at"] == 3 and result["complete"]
    assert found["weights"] == found["optimizer"] == found["losses"] == (not faults)
    names = [f"fixed_point: {part} equal" for part in ("losses", "weights", "optimizer")]
    assert (code, missed(result)) == ((1, names) if faults else (0, []))
    assert "3 of 6" in render.region("coco_resume", {"x.json": result})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--modes", "off,off"), "--modes must be different ones of off, fixed_point, truncate"),
        (("--modes", "snap"), "--modes must be different ones of off, fixed_point, truncate"),
        (("--seeds", "0,0"), "--seeds must differ, got 0,0"),
        (("--seeds", "-1"), "--seeds must be a whole number from 0 on, got '-1'"),
        (("--seeds", "0,1", "--repeats", "2,1,1"), "--repeats must be one number, or one for each"),
        (("--seeds", str(2**32)), "--seeds must be below 2^32, got 4294967296"),
        (("--modes", ""), "--modes must be different ones of off, fixed_point, truncate"),
        (("--steps", "1"), "--steps must be at least 2, got 1"),
        (("--steps", "abc"), "--steps: it must be a whole number from 1 on, got 'abc'"),
        (("--checkpoint-every", "-5"), "it must be a whole number from 0 on, got '-5'"),
        (("--image-size", "99999999"), "--image-size: it must be at most 16384, got '99999999'"),
        (("--lr", "0"), "--lr: it must be a number above 0, got '0'"),
        (("--lr", "nan"), "--lr: it must be a number above 0, got 'nan'"),
        (("--budget", "inf"), "--budget: it must be a number above 0, got 'inf'"),
        (("--out", __file__), "--out must be a folder, got the file 'test_coco_map.py'"),
        (("--framework", "mmdet", "--amp", "float16"), "--framework must be torchvision for --amp"),
        (("--data", "nothing"), "--data must be one of bccd, nuclei, bccd_tiny, nuclei_tiny, or"),
        (("--model", "mask_rcnn", "--data", "bccd_tiny"), "every object must have a mask"),
        (("--val-json", "x"), "--train-json, --train-images, --val-json and --val-images must be"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        coco_map.main([*TINY, *arguments])
    assert text in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"spec": {}}'])
def test_a_file_of_an_earlier_command_that_is_not_whole_is_named(
    content: str, tmp_path: Path
) -> None:
    path = tmp_path / "spec.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"^--resume: .*spec\.json must be a file that coco_map"):
        children._left(path, ("spec", "origin"))


def test_students_quantiles_are_those_of_tables() -> None:
    for freedom, expected in (
        (1, 12.7062),
        (2, 4.30265),
        (4, 2.77645),
        (9, 2.26216),
        (30, 2.04227),
    ):
        assert report.student_quantile(freedom) == pytest.approx(expected, rel=1e-5)
    found = report.interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0 and found["high"] == pytest.approx(2 + 4.30265 / 3**0.5, rel=1e-5)
    assert report.interval([1.0]) == {"n": 1, "mean": 1.0, "low": None, "high": None}


def a_mean(middle: float, n: int = 3) -> dict[str, Any]:
    mean = {"n": n, "mean": middle, "low": middle - 0.01, "high": middle + 0.01}
    return {"mean_ap": {"bbox": mean}, "seeds": {}}


@pytest.mark.parametrize(
    ("other", "n", "passed"), [(0.519, 3, [True]), (0.521, 3, [False]), (0.9, 2, [])]
)
def test_means_must_overlap_with_those_of_plain_training(
    other: float, n: int, passed: list[bool]
) -> None:
    found = report._check_means({"off": a_mean(0.5), "fixed_point": a_mean(other, n)})
    assert [check["passed"] for check in found] == passed


def test_a_committed_result_fills_the_tables(command: Command, tmp_path: Path) -> None:
    _, result = command(*FULL, full=True)
    clone = tmp_path / "clone"
    (clone / "experiments" / "results").mkdir(parents=True)
    (clone / "experiments" / "README.md").write_text("<!-- table: coco_map -->\n<!-- end -->\n")
    target = clone / "experiments" / "results" / f"{NAME}.json"
    target.write_text(json.dumps(result))
    assert tables.main(["--write", f"--root={clone}"]) == 0
    text = (clone / "experiments" / "README.md").read_text()
    first, second = (r["stats"]["bbox"]["AP"] for r in result["runs"] if r["mode"] == "fixed_point")
    assert first == second and text.count(repr(first)) >= 2  # full precision, twice
    assert "| none " in text and "| step 1 " in text and f"](results/{NAME}.png)" in text
    target.write_text(json.dumps({**result, "complete": False}))
    assert tables.main(["--check", f"--root={clone}"]) == 2
