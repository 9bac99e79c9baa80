"""detectron2's DefaultTrainer on the tiny set: plain and patched, order of RoIs, checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _detectron2_needed  # noqa: F401
import _detectron2_tiny as tiny
import pytest
import torch
from detectron2.engine import DefaultTrainer
from torch import Tensor
from truncdet.integrations import detectron2 as d2

import truncdet
from truncdet import _seed
from truncdet.testing import assert_bitwise_equal

LAYER = sys.modules["detectron2.layers.roi_align"]
MODES = ("fixed_point", "truncate")
each_mode = pytest.mark.parametrize("mode", MODES)
each_model = pytest.mark.parametrize("model", ["faster", "mask"])


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Every test leaves the operator and the random states as it found them."""
    function, restore = vars(LAYER)["roi_align"], _seed.saved_states()
    yield
    restore()
    assert not d2.is_patched()
    assert vars(LAYER)["roi_align"] is function


@contextmanager
def permuted(seed: int) -> Iterator[None]:
    """Hands the RoIs to whatever roi_align is in force in another order; its rows come back sorted.

    What follows in the model is the same to the bit; only the order inside the operator differs.
    """
    function = vars(LAYER)["roi_align"]
    draw = torch.Generator().manual_seed(seed)

    def shuffling(features: Tensor, boxes: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        order = torch.randperm(len(boxes), generator=draw)
        result: Tensor = function(features, boxes[order], *args, **kwargs)
        return result[order.argsort()]

    with pytest.MonkeyPatch.context() as change:
        change.setattr(LAYER, "roi_align", shuffling)
        yield


@each_model
@each_mode
def test_the_first_loss_is_that_of_the_plain_run(mode: str, model: str, tmp_path: Path) -> None:
    plain = tiny.train(tiny.config(tmp_path, model))
    with d2.patched(mode):
        ours = tiny.train(tiny.config(tmp_path, model))
    assert len(plain.losses) == len(ours.losses) == tiny.STEPS
    assert abs(plain.losses[0] - ours.losses[0]) <= 1e-4
    assert plain.digest != ours.digest  # so it was not the same code twice


@each_model
@each_mode
def test_two_patched_runs_have_equal_losses_and_weights(
    mode: str, model: str, tmp_path: Path
) -> None:
    with d2.patched(mode):
        first, second = (tiny.train(tiny.config(tmp_path, model)) for _ in range(2))
    assert_bitwise_equal(first.losses, second.losses)
    assert first.digest == second.digest


def test_negative_control_another_seed_gives_other_weights(tmp_path: Path) -> None:
    first, second = (tiny.train(tiny.config(tmp_path, steps=1), seed=seed) for seed in range(2))
    assert first.digest != second.digest


@each_mode
def test_an_order_of_rois_inside_the_operator_changes_nothing(mode: str, tmp_path: Path) -> None:
    with d2.patched(mode):
        first = tiny.train(tiny.config(tmp_path))
        with permuted(1):
            second = tiny.train(tiny.config(tmp_path))
    assert_bitwise_equal(first.losses, second.losses)
    assert first.digest == second.digest


def test_negative_control_it_changes_a_plain_run(tmp_path: Path) -> None:
    first = tiny.train(tiny.config(tmp_path))
    with permuted(1):
        second = tiny.train(tiny.config(tmp_path))
    assert first.losses[0] == second.losses[0]  # in the forward no RoI meets another
    assert first.digest != second.digest


def test_checkpoints_load_both_ways(tmp_path: Path) -> None:
    plain = tiny.train(tiny.config(tmp_path / "plain", steps=1))
    with d2.patched():
        ours = tiny.train(tiny.config(tmp_path / "ours", steps=1))
        states = [run.trainer.model.state_dict() for run in (plain, ours)]
        assert list(states[0]) == list(states[1])
        assert_resumes(tmp_path / "plain", plain)
    assert_resumes(tmp_path / "ours", ours)
    assert plain.digest != ours.digest


def assert_resumes(folder: Path, run: tiny.Run) -> None:
    """A new trainer takes up the run where it ended, without a word about keys, and trains on."""
    trainer = tiny.trainer(tiny.config(folder, steps=2), seed=7)
    assert truncdet.digest(trainer.model.state_dict()).hex != run.digest
    checkpoint = torch.load(folder / "model_final.pth")
    incompatible = trainer.checkpointer._load_model(dict(checkpoint))
    assert not incompatible.missing_keys and not incompatible.unexpected_keys
    trainer.resume_or_load(resume=True)
    assert truncdet.digest(trainer.model.state_dict()).hex == run.digest
    assert trainer.start_iter == 1
    trainer.train()
    assert truncdet.digest(trainer.model.state_dict()).hex != run.digest


@each_mode
def test_coco_evaluation_runs_and_repeats(mode: str, tmp_path: Path) -> None:
    trainer = tiny.train(tiny.config(tmp_path)).trainer
    with d2.patched(mode):
        results = [DefaultTrainer.test(trainer.cfg, trainer.model, evaluators(trainer))]
        results += [tiny.TinyTrainer.test(trainer.cfg, trainer.model) for _ in range(2)]
    for result in results:
        assert set(result) == {"bbox", "segm"}
        assert result["bbox"]["AP"] >= 0
    assert repr(results[0]) == repr(results[1]) == repr(results[2])  # repr: some entries are NaN


def evaluators(trainer: tiny.TinyTrainer) -> list[Any]:
    return [trainer.build_evaluator(trainer.cfg, name) for name in trainer.cfg.DATASETS.TEST]
