"""One run of experiments/coco_map.py on torchvision: data, order, training, resuming."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"

sys.path.append(str(EXPERIMENTS))
coco_run: Any = importlib.import_module("_coco_run")
coco_data: Any = importlib.import_module("_coco_data")
coco_images: Any = importlib.import_module("_coco_images")
coco_order: Any = importlib.import_module("_coco_order")
coco_record: Any = importlib.import_module("_coco_record")
coco_spec: Any = importlib.import_module("_coco_spec")
coco_torchvision: Any = importlib.import_module("_coco_torchvision")
checkpoint: Any = importlib.import_module("_coco_checkpoint")

CPU = torch.device("cpu")
TINY, NUCLEI = (coco_data.find_data(name) for name in ("bccd_tiny", "nuclei_tiny"))
# A batch of 3 of 8 images: the third step begins a second pass.
STEPS = 4


def a_spec(**changes: Any) -> Any:
    spec = coco_spec.Spec(
        framework="torchvision",
        model="faster_rcnn",
        size="tiny",
        device="cpu",
        mode="fixed_point",
        seed=3,
        repeat=0,
        steps=STEPS,
        batch=3,
        learning_rate=0.005,
        image_size=96,
        amp="float32",
        data=TINY,
    )
    return dataclasses.replace(spec, **changes)


def run(folder: Path, **changes: Any) -> dict[str, Any] | None:
    folder.mkdir(exist_ok=True)
    found: dict[str, Any] | None = coco_run.run(a_spec(**changes), folder, lambda: True)
    return found


BITS = ("loss_digests", "weights_digest", "optimizer_digest", "detections_sha256")


def bits(found: dict[str, Any] | None) -> dict[str, Any]:
    assert found is not None
    return {key: found[key] for key in BITS}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that nobody stopped, in a process of its own as the command starts it."""
    folder = tmp_path_factory.mktemp("whole")
    content = {"spec": a_spec().as_json(), "origin": {}}
    (folder / "spec.json").write_text(json.dumps(content))
    line = [sys.executable, "-W", "ignore", str(EXPERIMENTS / "_coco_run.py"), str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_a_run_learns_and_says_what_it_did(whole: dict[str, Any]) -> None:
    assert whole["finite"] and len(whole["losses"]) == len(whole["loss_digests"]) == STEPS
    assert len(set(whole["loss_digests"])) == STEPS
    assert whole["weights_digest"] != whole["initial_digest"]
    assert 0 <= whole["stats"]["bbox"]["AP"] < 1 and whole["detections"]["bbox"] > 0
    assert whole["ms_per_step"] > 0 and whole["peak_bytes"] > 1 << 20
    assert (whole["mode"], whole["seed"], whole["went_on_from"]) == ("fixed_point", 3, [])


def test_a_run_stopped_at_half_and_resumed_equals_one_that_was_not(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    assert run(tmp_path, stop_at=STEPS // 2) is None
    assert (tmp_path / "checkpoint.pt").exists()
    # What another process would not have.
    torch.rand(7)
    resumed = run(tmp_path)
    assert bits(resumed) == bits(whole)
    assert resumed is not None and resumed["went_on_from"] == [STEPS // 2]
    assert resumed["losses"] == whole["losses"]
    assert resumed["initial_digest"] == whole["initial_digest"]


@pytest.mark.parametrize("forgotten", ["optimizer", "random"])
def test_what_a_checkpoint_forgets_is_noticed(
    whole: dict[str, Any], tmp_path: Path, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, stop_at=STEPS // 2)
    path = tmp_path / "checkpoint.pt"
    content = torch.load(path, weights_only=False)
    if forgotten == "optimizer":
        content["optimizer"]["state"] = {}
    else:
        content["random"]["torch"] = torch.Generator().manual_seed(1).get_state()
    torch.save(content, path)
    resumed = run(tmp_path)
    assert resumed is not None and resumed["weights_digest"] != whole["weights_digest"]


def test_a_run_that_is_told_to_stop_goes_on_from_there(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    asked = itertools.count(1)
    spec = a_spec()
    assert coco_run.run(spec, tmp_path, lambda: next(asked) < 3) is None
    resumed = coco_run.run(spec, tmp_path, lambda: True)
    assert bits(resumed) == bits(whole) and resumed["went_on_from"] == [3]


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    run(tmp_path, stop_at=1)
    with pytest.raises(ValueError, match="must be of the same training, got another's"):
        run(tmp_path, learning_rate=0.006)


def test_a_checkpoint_is_written_wholly_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, a_spec(), {"step": 1})
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(tmp_path, a_spec(), {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_what_is_remembered_is_what_would_be_read_anew(
    whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coco_order.Remembered.__init__, "__defaults__", (0,))
    assert bits(run(tmp_path)) == bits(whole)


@pytest.mark.parametrize("mode", ["off", "truncate"])
def test_modes_start_alike_and_use_other_kernels(
    whole: dict[str, Any], tmp_path: Path, mode: str
) -> None:
    found = run(tmp_path, mode=mode)
    assert found is not None and found["initial_digest"] == whole["initial_digest"]
    assert found["losses"][0] == pytest.approx(whole["losses"][0], rel=1e-3)
    assert found["weights_digest"] != whole["weights_digest"]


def test_the_seed_decides_the_weights_at_the_start(whole: dict[str, Any], tmp_path: Path) -> None:
    found = run(tmp_path, seed=4, steps=2)
    assert found is not None and found["initial_digest"] != whole["initial_digest"]


@pytest.mark.parametrize(
    "amp",
    [pytest.param("float16", marks=pytest.mark.ci), "bfloat16"],  # slow on a CPU
)
def test_autocast_repeats(tmp_path: Path, amp: str) -> None:
    first, second = (run(tmp_path / str(i), amp=amp, steps=2, batch=2) for i in range(2))
    assert bits(first) == bits(second)
    full = run(tmp_path / "full", steps=2, batch=2)
    assert first is not None and full is not None
    assert first["losses"][0] == pytest.approx(full["losses"][0], rel=0.05)
    assert first["loss_digests"][0] != full["loss_digests"][0]


def test_masks_are_trained_and_found(tmp_path: Path) -> None:
    found = run(tmp_path, model="mask_rcnn", data=NUCLEI, steps=2, batch=2)
    assert found is not None and set(found["stats"]) == {"bbox", "segm"}
    assert found["detections"]["segm"] == found["detections"]["bbox"] > 0


def test_fixed_weights_are_evaluated_alike_with_ties_and_without(tmp_path: Path) -> None:
    trained = run(tmp_path / "train", keep_weights=True)
    weights = str(tmp_path / "train" / coco_run.WEIGHTS)
    plain, again, tied, tied_again = (
        run(tmp_path / str(i), weights=weights, ties=i > 1) for i in range(4)
    )
    assert trained is not None and plain is not None and again is not None
    assert tied is not None and tied_again is not None
    assert plain["detections_sha256"] == again["detections_sha256"]
    assert plain["detections_sha256"] == trained["detections_sha256"]
    assert plain["stats"] == trained["stats"] and "losses" not in plain
    assert tied["detections_sha256"] == tied_again["detections_sha256"]
    assert tied["detections_sha256"] != plain["detections_sha256"]
    assert tied["tied_scores"]["bbox"] > 0.5 * tied["detections"]["bbox"]
    assert plain["tied_scores"]["bbox"] < 0.1 * plain["detections"]["bbox"]


def test_scores_are_tied_within_a_category_alone() -> None:
    found = [{"category_id": c, "score": s} for c, s in ((1, 0.5), (1, 0.5), (2, 0.5), (2, 0.4))]
    assert coco_run.tied(found) == 2


def test_every_image_comes_once_in_a_pass_and_the_seed_decides() -> None:
    batches = list(itertools.islice(coco_order.order(7, 2, 0), 7))
    seen = [entry for batch in batches for entry in batch]
    assert sorted(index for index, _ in seen[:7]) == sorted(i for i, _ in seen[7:]) == [*range(7)]
    assert {mirrored for _, mirrored in seen} == {False, True}
    assert list(itertools.islice(coco_order.order(7, 2, 0), 7)) == batches
    assert list(itertools.islice(coco_order.order(7, 2, 1), 7)) != batches
    (large,) = itertools.islice(coco_order.order(2, 5, 0), 1)  # more than there are images
    assert len(large) == 5 and {index for index, _ in large} == {0, 1}


def test_the_learning_rate_rises_and_drops_once() -> None:
    spec = a_spec(steps=450)
    factors = [spec.factor(step) for step in range(450)]
    assert factors[0] == 1 / 50 and factors[49] == factors[374] == 1.0 and factors[375] == 0.1
    assert sorted(factors[:50]) == factors[:50] and set(factors[375:]) == {0.1}
    assert all(0 < a_spec(steps=n).factor(s) <= 1 for n in (2, 3, 9) for s in range(n))


def test_a_mirrored_image_has_its_boxes_and_masks_mirrored() -> None:
    images = coco_images.Images(NUCLEI.train, {1: 1}, CPU, objects=True, masks=True)
    assert len(images) == 8
    for index in range(2):
        pixels, mirrored = images.image(index), images.image(index, True)
        assert torch.equal(mirrored, pixels.flip(2)) and 0 < pixels.max() <= 1
        target, turned = images.target(index), images.target(index, True)
        for found in (target, turned):
            for box, mask in zip(found["boxes"], found["masks"], strict=True):
                rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
                tight = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                assert box.tolist() == [float(value) for value in tight]
        assert torch.equal(target["masks"].flip(2), turned["masks"])
        assert target["labels"].tolist() == [1] * len(target["boxes"])


@pytest.fixture
def odd_set(tmp_path: Path) -> Any:
    """COCO's layout with what real files have: crowds, empty boxes, gaps in ids, grey images."""
    for part, count in (("train", 3), ("val", 2)):
        folder = tmp_path / f"{part}2017"
        folder.mkdir()
        entries, objects = [], []
        for i in range(count):
            noise = np.random.default_rng(i).integers(0, 255, (40, 60), dtype=np.uint8)
            Image.fromarray(noise).save(folder / f"{i}.png")
            entries.append({"id": 10 * i + 5, "file_name": f"{i}.png", "height": 40, "width": 60})
        boxes = [[5, 5, 20, 20], [0, 0, 0, 9], [50, 30, 30, 30], [1, 1, 50, 30]]
        for j, box in enumerate(boxes):
            entry = {"id": j + 1, "image_id": 5, "category_id": 7 if j else 90, "bbox": box}
            objects.append({**entry, "iscrowd": int(j == 3), "area": box[2] * box[3]})
        kinds = [{"id": 90, "name": "b"}, {"id": 7, "name": "a"}]
        content = {"images": entries, "annotations": objects, "categories": kinds}
        (tmp_path / "annotations").mkdir(exist_ok=True)
        path = tmp_path / "annotations" / f"instances_{part}2017.json"
        path.write_text(json.dumps(content))
    return tmp_path


def test_the_layout_of_coco_is_read_with_all_its_oddities(odd_set: Path, tmp_path: Path) -> None:
    data = coco_data.find_data(str(odd_set))
    coco_data.check_data(data, masks=False)
    assert data.train.images == odd_set / "train2017"
    assert data.categories() == {7: "a", 90: "b"}
    described = coco_data.describe_data(data)
    assert described["val"]["images"] == 2 and described["categories"] == ["a", "b"]
    images = coco_images.Images(data.train, {7: 1, 90: 2}, CPU, objects=True, masks=False)
    assert images.ids == [5]  # the others have no object
    target = images.target(0)
    assert target["boxes"].tolist() == [[5, 5, 25, 25], [50, 30, 60, 40]]  # clipped; no crowd
    assert target["labels"].tolist() == [2, 1] and images.image(0).shape == (3, 40, 60)
    assert len(coco_images.Images(data.val, {7: 1, 90: 2}, CPU, objects=False, masks=False)) == 2
    found = run(tmp_path / "run", data=data, steps=2, batch=2)
    assert found is not None and found["finite"]


def test_detections_are_in_the_pixels_of_the_file() -> None:
    """A detector that finds every object says exactly what the annotations say."""
    trained = coco_torchvision.Trained(a_spec(model="mask_rcnn", data=NUCLEI))
    images = coco_images.Images(NUCLEI.val, trained.labels, CPU, objects=True, masks=True)
    truth = [images.target(i) for i in range(len(images))]
    found = []
    for key, target in zip(images.ids, truth, strict=True):
        result = {**target, "scores": torch.ones(len(target["labels"]))}
        result["masks"] = target["masks"][:, None].float()
        found += coco_torchvision._in_coco_format(key, result, {1: 1})
    for kind in ("bbox", "segm"):
        stats = coco_run.evaluate(NUCLEI.val.annotations, found, kind).stats
        assert stats["AP"] == pytest.approx(1.0), kind


@pytest.mark.parametrize("name", ["bccd", "nuclei"])
def test_sets_that_are_not_shipped_are_found_or_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coco_data, "HERE", tmp_path / "none")
    monkeypatch.delenv("TRUNCDET_DATA", raising=False)
    with pytest.raises(ValueError, match=rf"{name} must lie in .*TRUNCDET_DATA.*github\.com"):
        coco_data.find_data(name)
    source = coco_data.SHIPPED[f"{name}_tiny"]
    shutil.copytree(source, tmp_path / name)
    monkeypatch.setenv("TRUNCDET_DATA", str(tmp_path))
    data = coco_data.find_data(name)
    assert data.name == name and data == coco_data.find_data(str(tmp_path / name))
    assert coco_spec.CocoData.from_json(data.as_json()) == data


@pytest.mark.parametrize("change", ["json", "image", "category"])
def test_a_set_that_cannot_be_used_is_refused(odd_set: Path, change: str) -> None:
    data = coco_data.find_data(str(odd_set))
    path = data.val.annotations
    if change == "json":
        path.write_text("{}")
    elif change == "image":
        (data.val.images / "0.png").unlink()
    else:
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "categories": content["categories"][:1]}))
    with pytest.raises(ValueError, match=r"^--data: "):
        coco_data.check_data(data, masks=False)


def test_losses_that_are_not_finite_are_null(tmp_path: Path) -> None:
    recorder = coco_record.Recorder(a_spec(), tmp_path, lambda: True)
    model = torch.nn.Linear(2, 1)
    recorder.start(model)
    for loss in (1.0, float("nan")):
        recorder.before_step()
        recorder.after_step({"b": torch.tensor(loss), "a": 2.0}, model)
    found = recorder.finish(model, torch.optim.SGD(model.parameters(), 0.1))
    assert found["losses"] == [3.0, None] and not found["finite"]
    json.dumps(found, allow_nan=False)
