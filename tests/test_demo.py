"""`truncdet demo` from outside: its report, picture, sentence, interruption and error texts."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from rich.console import Console

import truncdet
from truncdet import _demo_train
from truncdet._cli import main
from truncdet._demo import run_demo
from truncdet._demo_options import BUNDLED, DemoError, DemoOptions
from truncdet._demo_report import prepare_out

STEPS = 12
DIGEST = re.compile(r"[0-9a-f]{16}")
SMALL = ("--device", "cpu", "--image-size", "96")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "truncdet", "demo", *arguments]


def read_report(folder: Path) -> dict[str, Any]:
    """The report, refusing the NaN and Infinity that Python's parser would let pass."""

    def refuse(token: str) -> None:
        raise AssertionError(f"report.json must be JSON, got {token}")

    text = (folder / "report.json").read_text(encoding="utf-8")
    report: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return report


def check_schema(report: dict[str, Any], modes: tuple[str, ...]) -> None:
    assert report["schema"] == 1
    assert report["device"] in ("cpu", "cuda")
    assert {"truncdet", "torch", "torchvision", "pycocotools"} <= set(report["versions"])
    assert isinstance(report["complete"], bool)
    for run in report["runs"]:
        assert run["mode"] in modes and run["repeat"] in (0, 1)
        count = len(run["losses"])
        assert all(type(loss) is float for loss in run["losses"])
        for digests in (run["loss_digests"], run["weights_digests"]):
            assert len(digests) == count and all(map(DIGEST.fullmatch, digests))
        if count:
            assert run["weights_digest"] == run["weights_digests"][-1]
        if run["complete"]:
            assert run["ms_per_step"] > 0 and run["peak_bytes"] > 1 << 20
            for figure in (run["mAP"], run["AP50"]):
                assert figure is None or 0 <= figure <= 1
    assert set(report["first_difference"]) == set(modes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A short demo on the CPU: the folder it wrote and what it printed."""
    out = tmp_path_factory.mktemp("demo") / "out"
    arguments = command(*SMALL, "--steps", str(STEPS), "--out", str(out))
    done = subprocess.run(arguments, cwd=out.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_report_follows_the_schema(finished: tuple[Path, str]) -> None:
    report = read_report(finished[0])
    check_schema(report, ("off", "fixed_point"))
    assert report["complete"] is True
    order = [(run["mode"], run["repeat"]) for run in report["runs"]]
    assert order == [("off", 0), ("off", 1), ("fixed_point", 0), ("fixed_point", 1)]
    assert all(run["complete"] and len(run["losses"]) == STEPS for run in report["runs"])


def test_fixed_point_repeats_and_plain_does_not(finished: tuple[Path, str]) -> None:
    report = read_report(finished[0])
    off_a, off_b, fixed_a, fixed_b = report["runs"]
    for key in ("losses", "loss_digests", "weights_digests", "weights_digest", "mAP", "AP50"):
        assert fixed_a[key] == fixed_b[key]
    assert report["first_difference"]["fixed_point"] is None
    assert off_a["weights_digest"] != off_b["weights_digest"]
    assert report["first_difference"]["off"] is not None
    assert report["perturbation"] is not None
    # The forward pass knows no order: the first loss is the same in every run of both modes.
    assert len({run["losses"][0] for run in (off_a, off_b)}) == 1
    assert len(set(fixed_a["losses"])) == STEPS


def test_picture_is_a_png_of_some_size(finished: tuple[Path, str]) -> None:
    with Image.open(finished[0] / "loss_difference.png") as picture:
        picture.load()
        assert picture.format == "PNG" and min(picture.size) >= 400
        assert picture.info["Software"] == "truncdet demo"


def test_screen_explains_the_order_and_ends_with_one_sentence(finished: tuple[Path, str]) -> None:
    text = " ".join(finished[1].split())
    assert "run B hands the RoIs to RoIAlign in another order" in text
    for word in ("loss A", "loss B", "weights A", "weights B", "AP50", "s/step", "peak MB"):
        assert word in text
    last = text[text.rindex("Shown:") :]
    assert last.count(". ") == 0 and last.endswith(".")
    assert "plain training (off) did not repeat: it first differed at step" in last
    assert f"repeated bit for bit, in all {STEPS} losses" in last
    # Twelve steps teach nothing, and the sentence must not claim otherwise.
    assert "below 0.1" in last
    # A path is never broken, so that it can be copied; all else fits a terminal of 80 columns.
    lines = [line for line in finished[1].splitlines() if not line.startswith("Written to")]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_a_valid_partial_report(tmp_path: Path, number: int) -> None:
    arguments = command(*SMALL, "--steps", "1000000", "--out", str(tmp_path / "out"))
    with subprocess.Popen(
        arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            # The first step writes the report; only then is there a partial run to leave behind.
            while process.poll() is None and not _has_losses(tmp_path / "out"):
                time.sleep(0.05)
            process.send_signal(number)
            text, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 128 + number, text
    report = read_report(tmp_path / "out")
    check_schema(report, ("off", "fixed_point"))
    assert report["complete"] is False
    (run,) = report["runs"]
    assert run["losses"] and not run["complete"] and run["AP50"] is None
    assert report["compared_steps"] == {"off": 0, "fixed_point": 0}
    assert "Stopped early" in text and "Shown" not in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.json"]


def _has_losses(folder: Path) -> bool:
    runs = read_report(folder)["runs"] if (folder / "report.json").exists() else []
    return any(run["losses"] for run in runs)


def quick(out: Path, **changes: Any) -> DemoOptions:
    options = DemoOptions(steps=2, device="cpu", image_size=64, batch=1, out=out)
    return replace(options, **changes)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=80)


def test_demo_fails_when_fixed_point_runs_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def broken(*, mode: str, seed: int) -> Any:
        with real(mode="off", seed=seed) as table:
            yield table

    real = truncdet.deterministic
    monkeypatch.setattr(truncdet, "deterministic", broken)
    console = quiet()
    assert run_demo(quick(tmp_path, modes=("fixed_point",), image_size=96), console) == 1
    assert read_report(tmp_path)["first_difference"]["fixed_point"] is not None
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "FAILED" in text and "Shown" not in text


def test_truncate_can_be_chosen_alone(tmp_path: Path) -> None:
    assert run_demo(quick(tmp_path, modes=("truncate",)), quiet()) == 0
    check_schema(read_report(tmp_path), ("truncate",))


def test_diverged_training_is_an_error_and_the_report_stays_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_demo_train, "LEARNING_RATE", 1e30)
    with pytest.raises(DemoError, match=r"the loss must stay finite, got .* in run off A at step"):
        run_demo(quick(tmp_path, steps=20), quiet())
    report = read_report(tmp_path)
    check_schema(report, ("off", "fixed_point"))
    assert report["complete"] is False


def write_set(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A set with what real ones have: gaps in ids, grey image, crowd, empty box, no boxes."""
    folder.mkdir()
    Image.effect_noise((120, 90), 60).save(folder / "grey.png")
    Image.effect_noise((90, 120), 60).convert("RGB").save(folder / "tall.jpg")
    Image.new("RGB", (100, 100), "white").save(folder / "nothing.png")
    annotations = [
        {"id": 1, "image_id": 30, "category_id": 90, "bbox": [10, 10, 40, 40], "iscrowd": 0},
        {"id": 2, "image_id": 30, "category_id": 7, "bbox": [60, 20, 50.5, 60], "area": 3000},
        {"id": 3, "image_id": 30, "category_id": 7, "bbox": [0, 0, 100, 50], "iscrowd": 1},
        {"id": 4, "image_id": 30, "category_id": 7, "bbox": [5, 5, 0, 20]},
        {"id": 5, "image_id": 10, "category_id": 90, "bbox": [-20, 40, 60, 300]},
        {"id": 6, "image_id": 10, "category_id": 90, "bbox": [500, 500, 20, 20]},
    ]
    content: dict[str, Any] = {
        "images": [
            {"id": 30, "file_name": "grey.png"},
            {"id": 10, "file_name": "tall.jpg", "width": 90, "height": 120},
            {"id": 20, "file_name": "nothing.png"},
        ],
        "annotations": annotations,
        "categories": [{"id": 90, "name": "b"}, {"id": 7, "name": "a"}],
    }
    file = folder / "set.json"
    file.write_text(json.dumps(content))
    return file, content


def test_any_coco_set_can_be_used(tmp_path: Path) -> None:
    file, _ = write_set(tmp_path / "set")
    options = quick(tmp_path / "out", data=file.parent, ann=file, steps=4, batch=2)
    assert run_demo(options, quiet()) == 0
    report = read_report(tmp_path / "out")
    check_schema(report, ("off", "fixed_point"))
    assert report["data"]["train_images"] == 3
    assert report["data"]["train_boxes"] == 4
    assert report["data"]["crowd_boxes_left_out"] == 1
    assert report["data"]["empty_boxes_left_out"] == 1
    assert report["data"]["eval_on"] == "3 images it was trained on"


def test_a_set_without_any_box_has_no_ap(tmp_path: Path) -> None:
    file, content = write_set(tmp_path / "set")
    file.write_text(json.dumps({**content, "annotations": []}))
    options = quick(tmp_path / "out", data=file.parent, ann=file, modes=("off",))
    assert run_demo(options, quiet()) == 0
    assert [run["mAP"] for run in read_report(tmp_path / "out")["runs"]] == [None, None]


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["demo", "--steps", "1", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def changed(content: dict[str, Any], part: str, **values: Any) -> str:
    first, *others = content[part]
    return json.dumps({**content, part: [{**first, **values}, *others]})


BAD_FILES = {
    "not JSON": (lambda c: "{", "--ann must be JSON, got"),
    "a list": (lambda c: "[]", "--ann must be in COCO's format with a list of objects 'images'"),
    "no annotations": (
        lambda c: json.dumps({**c, "annotations": None}),
        "with a list of objects 'annotations'",
    ),
    "no images": (lambda c: json.dumps({**c, "images": []}), "must have images and categories"),
    "double id": (lambda c: changed(c, "images", id=20), "image ids must be unique, got 20"),
    "no such image": (
        lambda c: changed(c, "images", file_name="x.png"),
        "image 30: file_name must be a file in --data",
    ),
    "image id": (
        lambda c: changed(c, "annotations", image_id=4),
        "annotation 1: image_id must be a listed image, got 4",
    ),
    "category": (
        lambda c: changed(c, "annotations", category_id=1),
        "annotation 1: category_id must be a listed one, got 1",
    ),
    "three numbers": (
        lambda c: changed(c, "annotations", bbox=[1, 2, 3]),
        "annotation 1: bbox must be four finite numbers, got [1, 2, 3]",
    ),
    "NaN": (
        lambda c: changed(c, "annotations", bbox=[1, 2, float("nan"), 3]),
        "annotation 1: bbox must be four finite numbers, got [1, 2, nan, 3]",
    ),
    "text as id": (
        lambda c: changed(c, "categories", id="7"),
        "a category: id must be an integer, got '7'",
    ),
    "not an image": (
        lambda c: changed(c, "images", file_name="set.json"),
        "--data must have readable images, got",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_annotation_files_are_named(tmp_path: Path, case: str) -> None:
    make, expected = BAD_FILES[case]
    file, content = write_set(tmp_path / "set")
    file.write_text(make(content))
    places = ("--data", str(file.parent), "--ann", str(file), "--out", str(tmp_path / "out"))
    code, text = invoke("--batch", "3", "--device", "cpu", *places)
    assert (code, expected in text) == (2, True), text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "0"], "Invalid value for '--steps': 0 is not in the range x>=1"),
        (["--steps", "many"], "Invalid value for '--steps': 'many' is not a valid integer"),
        (["--device", "tpu"], "Invalid value for '--device': 'tpu' is not one of"),
        (["--mode", "snap"], "Invalid value for '--mode': 'snap' is not one of"),
        (["--seed", "-1"], "Invalid value for '--seed': -1 is not in the range"),
        (["--data", "."], "--data and --ann must be given together, got --data only"),
        (["--ann", "x.json"], "--data and --ann must be given together, got --ann only"),
        (["--eval-ann", "x.json"], "--eval-ann must come with --data, got it alone"),
        (["--data", "nowhere", "--ann", "x.json"], "--data must be a folder, got nowhere"),
        (["--data", ".", "--ann", "x.json"], "--ann must be a readable file, got x.json (No such"),
    ],
)
def test_bad_options_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = invoke(*arguments)
    assert (code, expected in text) == (2, True), text
    assert list(tmp_path.iterdir()) == []


def test_cuda_without_a_gpu_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, text = invoke("--device", "cuda", "--out", str(tmp_path))
    assert code == 2 and "--device must be cpu or auto on this machine, got cuda" in text


def test_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    foreign = {"report.json": b'{"schema": 1}', "loss_difference.png": b"a drawing"}
    for name, content in foreign.items():
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_bytes(content)
        code, text = invoke("--device", "cpu", "--out", str(folder))
        assert (code, f"--out must not hold a {name} of other origin" in text) == (2, True), text
        assert [path.read_bytes() for path in folder.iterdir()] == [content]
    (tmp_path / "file").write_text("mine")
    code, text = invoke("--device", "cpu", "--out", str(tmp_path / "file"))
    assert code == 2 and "--out must be a folder" in text


def test_files_of_an_earlier_demo_are_replaced(finished: tuple[Path, str], tmp_path: Path) -> None:
    for path in finished[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    prepare_out(tmp_path)
    # Gone at once, so that an interrupted run cannot leave the picture of another one.
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert run_demo(quick(tmp_path, steps=1), quiet()) == 0
    assert read_report(tmp_path)["steps"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "loss_difference.png",
        "report.json",
    ]


def test_bundled_files_are_those_of_the_checksums() -> None:
    lines = (BUNDLED / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    files = {p.relative_to(BUNDLED).as_posix(): p for p in BUNDLED.rglob("*") if p.is_file()}
    files.pop("SHA256SUMS")
    found = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert found == listed and len(found) == 17


@pytest.mark.ci
def test_default_demo_learns_in_every_run(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--out", str(tmp_path / "out")),
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(tmp_path / "out")
    assert report["complete"] and len(report["runs"]) == 4
    assert min(run["AP50"] for run in report["runs"]) > 0.1
    assert report["first_difference"]["fixed_point"] is None
