"""The experiments run, their conditions can fail, and the committed tables are the results."""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments"

# They are programs, not a package: each finds its helpers beside itself.
sys.path.append(str(EXPERIMENTS))
overhead: Any = importlib.import_module("overhead")
train_step: Any = importlib.import_module("train_step")
tables: Any = importlib.import_module("tables")
checks: Any = importlib.import_module("_checks")
environment: Any = importlib.import_module("_environment")
measure: Any = importlib.import_module("_measure")
roi_cases: Any = importlib.import_module("_roi_cases")
render: Any = importlib.import_module("_render")
record_commit: Any = importlib.import_module("record_commit")

HEAD = {
    "schema": 1,
    "command": "python experiments/x.py",
    "commit": "0123456789abcdef",
    "dirty": False,
    "device": "GPU X",
    "versions": {"torch": "2.11.0", "torchvision": "0.26.0"},
    "size": "full",
}


def a_row(**changes: Any) -> dict[str, Any]:
    """A row of overhead.py that meets every limit exactly."""
    side = {"forward_ms": 1.0, "backward_ms": 2.0, "bits_equal": True, "backward_peak_bytes": 1000}
    error = {"native": {"max": 4.0, "l2": 8.0}, "truncdet": {"max": 5.0, "l2": 10.0}}
    row = {
        "name": "case",
        "layout": "NCHW",
        "images": 2,
        "rois_per_image": 3,
        "backward_limit": 0.35,
        "backward_ratio": 0.35,
        "forward_ratio": 1.0,
        "output_bytes": 1000,
        "native": dict(side),
        "truncdet": dict(side),
        "errors": {"forward": error, "backward": error},
    }
    return {**copy.deepcopy(row), **changes}


def a_run(mode: str, **changes: Any) -> dict[str, Any]:
    """A run of train_step.py; every run is alike."""
    run = {
        "mode": mode,
        "finite": True,
        "trained": True,
        "loss_digests": ["a", "b", "c"],
        "weights_digest": "w",
        "step_ms": [900.0, 10.0, 10.0],
        "peak_bytes": 100,
    }
    return {**run, **changes}


def some_runs(**changes: Any) -> list[dict[str, Any]]:
    """Two plain and two patched runs, of which the last is changed."""
    runs = [a_run("off"), a_run("off"), a_run("fixed_point")]
    return [*runs, a_run("fixed_point", **changes)]


def an_overhead_result(**changes: Any) -> dict[str, Any]:
    row = a_row()
    result = {**HEAD, "experiment": "overhead", "rows": [row], "scatter": []}
    return {**result, "checks": overhead.check_row(row, True), **changes}


def run(program: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXPERIMENTS / program), *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("program", ["overhead", "train_step", "frameworks"])
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_full_size_is_refused_on_a_cpu_before_anything_is_written(
    program: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = importlib.import_module(program)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # What any of them would do next.
    monkeypatch.setattr(module, "describe", None)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    for out in ((), ("--out", str(tmp_path))):
        with pytest.raises(SystemExit, match=r"^--size: full .* no GPU.*--device cpu --size tiny"):
            module.main(["--device", device, *out])
    assert list(tmp_path.iterdir()) == []


def test_full_size_on_the_cpu_of_a_machine_with_a_gpu_is_refused_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit, match="got --device cpu"):
        environment.pick_device("cpu", "full")
    assert environment.pick_device("cpu", "tiny") == torch.device("cpu")


def names_of_missed(found: list[dict[str, Any]]) -> list[str]:
    return [check["name"] for check in found if not check["passed"]]


def test_overhead_runs_on_a_cpu_and_writes_its_result(tmp_path: Path) -> None:
    done = run("overhead.py", "--device", "cpu", "--size", "tiny", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "overhead_cpu.json").read_text())
    assert result["command"] == "python experiments/overhead.py --device cpu --size tiny"
    assert len(result["rows"]) == 2 * len(roi_cases.CASES)
    assert all(row["truncdet"]["bits_equal"] for row in result["rows"])
    # What is compared is the same operator: errors of both are those of float32.
    for row in result["rows"]:
        for sides in row["errors"].values():
            assert 0 < sides["truncdet"]["l2"] < 1e-4, row["name"]
            assert 0 < sides["native"]["l2"] < 1e-4, row["name"]
    operators = {row["operator"] for row in result["scatter"]}
    assert operators == {"index_add", "scatter_add", "index_put"}
    assert all(row["truncdet_bits_equal"] for row in result["scatter"])
    assert str(ROOT) not in json.dumps(result)
    assert "16x512" in done.stdout and "conditions met" in done.stdout


def test_train_step_runs_on_a_cpu_and_its_repeats_are_equal(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--size", "tiny", "--steps", "2", "--amp-steps", "2")
    done = run("train_step.py", *arguments, "--precisions=float32,bfloat16", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "train_step_cpu.json").read_text())
    assert not result["complete"]  # float16 was left out
    assert [(r["precision"], r["mode"], r["repeat"]) for r in result["runs"]] == [
        ("float32", "off", 0),
        ("float32", "fixed_point", 0),
        ("float32", "off", 1),
        ("float32", "fixed_point", 1),
        ("bfloat16", "off", 0),
        ("bfloat16", "fixed_point", 0),
        ("bfloat16", "fixed_point", 1),
    ]
    for training in result["runs"]:
        assert len(training["loss_digests"]) == 2
        assert len(set(training["loss_digests"])) == 2
    # The patched runs went through other kernels than the plain ones.
    weights = {
        r["mode"]: r["weights_digest"] for r in result["runs"] if r["precision"] == "float32"
    }
    assert weights["off"] != weights["fixed_point"]


@pytest.mark.ci
def test_train_step_runs_with_a_gradient_scaler() -> None:
    arguments = ("--device", "cpu", "--size", "tiny", "--amp-steps", "2", "--precisions", "float16")
    done = run("train_step.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_row_at_the_limits_passes() -> None:
    found = overhead.check_row(a_row(), True)
    assert len(found) == 8 and not names_of_missed(found)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"backward_ratio": 0.351}, "case, NCHW: backward"),
        ({"backward_ratio": float("nan")}, "case, NCHW: backward"),
        ({"forward_ratio": 1.01}, "case, NCHW: forward"),
        ({"truncdet": {"bits_equal": False, "backward_peak_bytes": 0}}, "case, NCHW: bits repeat"),
        (
            {"truncdet": {"bits_equal": True, "backward_peak_bytes": 1001 + 6 * 8192 + (4 << 20)}},
            "case, NCHW: bytes beyond the output",
        ),
        (
            {"errors": {"backward": {"native": {"l2": 4.0}, "truncdet": {"l2": 5.1}}}},
            "case, NCHW: backward error, l2",
        ),
    ],
)
def test_a_row_beyond_a_limit_is_missed(changes: dict[str, Any], name: str) -> None:
    assert names_of_missed(overhead.check_row(a_row(**changes), True)) == [name]


def test_times_of_channels_last_rows_have_no_limit() -> None:
    row = a_row(layout="channels_last", backward_ratio=9.0, forward_ratio=9.0)
    assert not names_of_missed(overhead.check_row(row, True))


def test_a_missed_condition_is_printed_and_is_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = checks.at_most("time", 0.5, 0.5)
    assert checks.conclude([good]) == 0
    assert checks.conclude([good, checks.at_most("backward", 0.61, 0.6)]) == 1
    assert checks.conclude([checks.holds("bits repeat", False)]) == 1
    assert checks.conclude([]) == 1
    out = capsys.readouterr().out
    assert "MISSED backward: 0.61, must be at most 0.6" in out
    assert "MISSED bits repeat: false, must be true" in out


def test_equal_runs_meet_the_conditions_of_a_training_step() -> None:
    found = train_step.check("float32", some_runs(), True)
    assert len(found) == 6 and not names_of_missed(found)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"loss_digests": ["a", "b", "x"]}, "float32: patched losses repeat"),
        ({"weights_digest": "x"}, "float32: patched weights repeat"),
        ({"finite": False}, "float32: all losses finite"),
        ({"trained": False}, "float32: parameters change"),
        ({"step_ms": [900.0, 11.0, 11.0]}, "float32: step time"),
        ({"peak_bytes": 105}, "float32: peak memory"),
    ],
)
def test_a_training_step_beyond_a_condition_is_missed(changes: dict[str, Any], name: str) -> None:
    assert names_of_missed(train_step.check("float32", some_runs(**changes), True)) == [name]


def test_the_first_difference_is_the_first_step_that_differs() -> None:
    assert train_step.first_difference("abcd", "abxx") == 2
    assert train_step.first_difference("abcd", "abcd") is None
    with pytest.raises(ValueError):
        train_step.first_difference("abc", "abcd")


def test_the_budget_cuts_all_steps_in_proportion() -> None:
    wanted = {"float32": 200, "float16": 60}  # 4 and 3 runs
    step_s = {"float32": 0.1, "float16": 0.1}  # 98 s
    assert train_step.affordable(wanted, step_s, 1.0, 135.0) == wanted
    left = (98 / 2 + 7) / train_step.MARGIN + 0.01
    assert train_step.affordable(wanted, step_s, 1.0, left) == {"float32": 100, "float16": 30}
    assert train_step.affordable(wanted, step_s, 1.0, 0.0) == {"float32": 20, "float16": 20}


def test_repetitions_are_compared_by_their_bits() -> None:
    values = iter([torch.tensor(0.0), torch.tensor(-0.0)])
    assert not measure.repeats_equal(lambda: next(values), 2)
    assert measure.repeats_equal(lambda: torch.tensor(float("nan")), 2)


@pytest.mark.parametrize(("budget", "calls"), [(0.0, 2), (1e9, 2 + 5 + 20)])
def test_a_call_beyond_the_budget_is_not_repeated(
    budget: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "BUDGET_S", budget)
    seen: list[None] = []
    assert measure.median_ms(lambda: seen.append(None), torch.device("cpu")) >= 0
    assert len(seen) == calls


def test_errors_are_relative() -> None:
    exact = torch.tensor([3.0, -4.0], dtype=torch.float64)
    assert measure.errors(torch.tensor([3.0, -3.0]), exact) == {"max": 0.25, "l2": 0.2}


def test_the_boxes_lie_in_their_images() -> None:
    for case in roi_cases.CASES:
        boxes = roi_cases.make_boxes(case)
        width, height = case.width / case.spatial_scale, case.height / case.spatial_scale
        assert boxes.shape == (case.rois, 5)
        assert boxes[:, 0].long().bincount().tolist() == [case.rois_per_image] * case.images
        assert (boxes[:, 1:3] >= 0).all() and (boxes[:, 1:3] < boxes[:, 3:5]).all()
        assert (boxes[:, 3] <= width).all() and (boxes[:, 4] <= height).all()


def test_the_output_folder_is_no_part_of_the_recorded_command() -> None:
    typed = ["--size", "tiny", "--out", "/somewhere", "--steps=3", "--out=/else"]
    line = environment.command_line("train_step", typed)
    assert line == "python experiments/train_step.py --size tiny --steps=3"


def test_without_git_the_commit_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.delenv("TRUNCDET_COMMIT", raising=False)
    assert environment.find_commit() == (None, None)
    monkeypatch.setenv("TRUNCDET_COMMIT", "abc")
    assert environment.find_commit() == ("abc", None)


def test_a_written_result_reads_back_equal(tmp_path: Path) -> None:
    result = {"experiment": "x", "device": "NVIDIA H200", "runs": [{"losses": [1.5, None]}, {}]}
    result["texts"] = ["two  spaces [", "]"]
    path = environment.write_result(tmp_path, result)
    assert path.name == "x_nvidia-h200.json"
    assert json.loads(path.read_text()) == result
    assert "[1.5, null]" in path.read_text()
    with pytest.raises(ValueError):
        environment.write_result(tmp_path, {**result, "runs": [float("nan")]})


def committed_regions() -> dict[tuple[str, str], str]:
    found = {}
    for path in (ROOT / "README.md", EXPERIMENTS / "README.md"):
        for name, content in re.findall(
            r"<!-- table: (\S+) -->(.*?)<!-- end -->", path.read_text(), re.DOTALL
        ):
            found[path.parent.name, name] = content
    return found


def test_committed_tables_equal_the_committed_results() -> None:
    done = run("tables.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    regions = committed_regions()
    assert {name for _, name in regions} == {*render.OVERVIEWS, *render.TABLES}
    # The same once more without the program's own reading: what stands there, or that nothing does.
    for (_, name), content in regions.items():
        if name == "operators":  # of the package, not of a result
            assert all(f"| `{row.name}`" in content for row in render.ROWS)
            continue
        experiment = render.TABLES.get(name, (None,))[0]
        files = sorted((EXPERIMENTS / "results").glob(f"{experiment or '*'}_*.json"))
        if experiment is not None and not files:
            assert "not measured yet" in content.lower(), name
        for path in files:
            result = json.loads(path.read_text())
            if result["experiment"] in render.CLAIMS:
                assert result["device"] in content and result["command"] in content, name
                assert result["commit"] is None or result["commit"][:12] in content, name


def a_clone(folder: Path, *results: dict[str, Any]) -> Path:
    (folder / "experiments/results").mkdir(parents=True)
    shutil.copy(EXPERIMENTS / "README.md", folder / "experiments/README.md")
    (folder / "README.md").write_text("Text.\n<!-- table: overhead -->\n<!-- end -->\nMore.\n")
    for result in results:
        environment.write_result(folder / "experiments/results", result)
    return folder


def test_tables_are_written_from_results_and_a_change_is_noticed(tmp_path: Path) -> None:
    clone = a_clone(tmp_path, an_overhead_result())
    where = f"--root={clone}"
    assert tables.main(["--check", where]) == 1
    assert tables.main(["--write", where]) == 0
    assert tables.main(["--check", where]) == 0
    readme = clone / "README.md"
    text = readme.read_text()
    assert text.startswith("Text.\n") and text.endswith("<!-- end -->\nMore.\n")
    assert "| 0.35 " in text and "GPU X" in text and "0123456789ab" in text
    assert "not measured yet" in (clone / "experiments/README.md").read_text()  # train_step
    readme.write_text(text.replace("| 0.35 ", "| 0.34 "))
    assert tables.main(["--check", where]) == 1


def test_without_results_the_tables_say_so(tmp_path: Path) -> None:
    clone = a_clone(tmp_path)
    assert tables.main(["--write", f"--root={clone}"]) == 0
    assert "Not measured yet" in (clone / "README.md").read_text()


def test_a_missed_condition_stands_in_the_table_of_claims(tmp_path: Path) -> None:
    row = a_row(backward_ratio=0.9)
    clone = a_clone(tmp_path, an_overhead_result(checks=overhead.check_row(row, True), dirty=True))
    assert tables.main(["--write", f"--root={clone}"]) == 0
    text = (clone / "experiments/README.md").read_text()
    assert "missed 1 of 8: case, NCHW: backward" in text and "0123456789ab, with changes" in text


@pytest.mark.parametrize(
    "changes", [{"size": "tiny"}, {"complete": False}, {"schema": 2}, {"marker": "nothing"}]
)
def test_unfit_results_and_unknown_markers_are_refused(
    tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    clone = a_clone(tmp_path, an_overhead_result(**changes))
    if "marker" in changes:
        (clone / "README.md").write_text("<!-- table: nothing -->\n<!-- end -->\n")
    assert tables.main(["--check", f"--root={clone}"]) == 2
    assert "must" in capsys.readouterr().err


def test_a_marker_without_an_end_is_refused(tmp_path: Path) -> None:
    clone = a_clone(tmp_path)
    (clone / "README.md").write_text("<!-- table: overhead -->\n")
    assert tables.main(["--check", f"--root={clone}"]) == 2


def test_a_commit_is_recorded_once_and_said_to_be_recorded_afterwards(tmp_path: Path) -> None:
    result = {**HEAD, "experiment": "x", "commit": None, "dirty": None}
    path = environment.write_result(tmp_path, result)
    with pytest.raises(ValueError, match="COMMIT must be 40 hex digits, got 'abc'"):
        record_commit.record(path, "abc")
    record_commit.record(path, "ab" * 20)
    found = json.loads(path.read_text())
    assert found == {**result, "commit": "ab" * 20, "commit_recorded": "after the run"}
    with pytest.raises(ValueError, match="already names commit abab"):
        record_commit.record(path, "cd" * 20)
