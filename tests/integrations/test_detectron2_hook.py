"""The hook in scripts like detectron2's train_net.py: what it opens, records and puts back."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _detectron2_needed  # noqa: F401
import _detectron2_tiny as tiny
import pytest
import torch
from detectron2.engine import HookBase, default_setup
from truncdet.integrations import aten
from truncdet.integrations import detectron2 as d2
from truncdet.integrations import torchvision as tv
from truncdet.integrations.detectron2 import TruncdetHook, add_truncdet_config, build_hook

import truncdet
from truncdet import _scopes, _seed
from truncdet.testing import assert_bitwise_equal

LAYER: Any = sys.modules["detectron2.layers.roi_align"]
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
KERNELS = ("_index_put_impl_", "grid_sampler_2d_backward", "index_add_", "scatter_reduce.two_out")


def surroundings() -> dict[str, Any]:
    """All that the hook may change for the time of a training."""
    return {
        "names": [vars(LAYER)["roi_align"], vars(sys.modules["detectron2.layers"])["roi_align"]],
        "call": "__call__" in vars(vars(LAYER)["ROIAlign"]),
        "patched": (d2.mode(), tv.mode()),
        "aten": aten.mode(),
        "kernels": [torch._C._dispatch_dump(f"aten::{name}") for name in KERNELS],
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cublas": os.environ.get(CUBLAS),
        "notes": _scopes.notes(),
        "dispatch modes": torch.utils._python_dispatch._len_torch_dispatch_stack(),
    }


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(CUBLAS, raising=False)
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # default_setup sets it; this puts it back
    before, restore = surroundings(), _seed.saved_states()
    benchmark = torch.backends.cudnn.benchmark
    yield
    restore()
    torch.backends.cudnn.benchmark = benchmark
    assert surroundings() == before


class Log(logging.Handler):
    """The messages of the hook's logger."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def log() -> Iterator[Log]:
    logger, handler = logging.getLogger("detectron2.truncdet"), Log()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


class Probe(HookBase):  # type: ignore[misc]
    """Notes the surroundings at one moment of the training, and may end it with an exception."""

    def __init__(self, moment: str, failing: bool = False) -> None:
        self.seen: list[dict[str, Any]] = []
        setattr(self, moment, self.look)
        self.failing = failing

    def look(self) -> None:
        self.seen.append(surroundings())
        if self.failing:
            raise RuntimeError("stop here")


def config(folder: Path, steps: int = 2, **values: Any) -> Any:
    cfg = tiny.config(folder, steps=steps)
    add_truncdet_config(cfg)
    for key, value in {"ENABLED": True, **values}.items():
        setattr(cfg.MODEL.TRUNCDET, key, value)
    return cfg


def train_net(cfg: Any, *hooks: HookBase, setup: bool = True) -> tiny.TinyTrainer:
    """The main function of a script that was changed by three lines."""
    if setup:
        default_setup(cfg, argparse.Namespace(eval_only=False, config_file=""))
    trainer = tiny.TinyTrainer(cfg)
    trainer.resume_or_load(resume=False)
    trainer.register_hooks([build_hook(cfg), *hooks])
    trainer.train()
    return trainer


@pytest.mark.parametrize("mode", ["fixed_point", "truncate"])
@pytest.mark.parametrize("strict", [False, True])
def test_it_holds_through_the_training_and_no_longer(
    mode: str, strict: bool, tmp_path: Path
) -> None:
    before = surroundings()
    moments = [Probe("before_train"), Probe("after_step"), Probe("before_step")]
    train_net(config(tmp_path, MODE=mode, STRICT=strict), *moments, setup=False)
    inside = moments[1].seen[-1]
    assert inside["patched"] == (mode, mode)
    # 'truncate' knows nothing of PyTorch's own operators.
    assert inside["aten"] == ("fixed_point" if mode == "fixed_point" else "off")
    assert (inside["kernels"] != before["kernels"]) == (mode == "fixed_point")
    assert all(new is not old for new, old in zip(inside["names"], before["names"], strict=True))
    assert inside["cudnn"] == (True, False)
    assert inside["cublas"] == ":4096:8"
    assert inside["dispatch modes"] == before["dispatch modes"] + strict
    assert all(seen == inside for probe in moments for seen in probe.seen)
    assert [len(probe.seen) for probe in moments] == [1, 2, 2]


@pytest.mark.parametrize("moment", ["before_train", "before_step", "after_backward", "after_step"])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exception_in_the_middle_restores_everything(
    moment: str, strict: bool, tmp_path: Path
) -> None:
    before = surroundings()
    probe = Probe(moment, failing=True)
    if moment == "after_backward":
        # detectron2's trainers do not hand this moment on to the hooks of the outer trainer.
        cfg = config(tmp_path, STRICT=strict)
        trainer = tiny.trainer(cfg)
        trainer.register_hooks([build_hook(cfg)])
        trainer._trainer.register_hooks([probe])
        with pytest.raises(RuntimeError, match="stop here"):
            trainer.train()
    else:
        with pytest.raises(RuntimeError, match="stop here"):
            train_net(config(tmp_path, STRICT=strict), probe, setup=False)
    assert probe.seen and probe.seen[-1]["patched"] == ("fixed_point", "fixed_point")
    assert surroundings() == before


def test_an_exception_before_it_started_leaves_nothing(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    trainer = tiny.trainer(cfg)
    trainer.register_hooks([Probe("before_train", failing=True), build_hook(cfg)])
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.train()


def test_an_exception_of_another_hook_at_the_end_restores_everything(tmp_path: Path) -> None:
    before, cfg = surroundings(), config(tmp_path, steps=1)
    trainer, probe = tiny.trainer(cfg), Probe("after_train", failing=True)
    trainer.register_hooks([probe, build_hook(cfg)])  # detectron2 never gets to the second
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.train()
    assert probe.seen[0]["patched"] == ("fixed_point", "fixed_point")
    assert surroundings() == before
    assert "after_train" not in vars(trainer)


def test_an_end_that_somebody_else_gave_the_trainer_is_kept(tmp_path: Path) -> None:
    before, cfg = surroundings(), config(tmp_path, steps=1)
    trainer, ended = tiny.trainer(cfg), []

    def theirs() -> None:
        ended.append(d2.mode())

    trainer.after_train = theirs
    trainer.register_hooks([build_hook(cfg)])
    trainer.train()
    assert ended == ["fixed_point"]
    assert vars(trainer)["after_train"] is theirs
    assert surroundings() == before


def test_a_run_that_nobody_ended_is_ended_by_the_next() -> None:
    before, hook = surroundings(), TruncdetHook(verbose=False)
    hook.before_train()
    hook.before_train()
    assert d2.is_patched() and torch.backends.cudnn.deterministic
    hook.after_train()
    assert surroundings() == before
    hook.after_train()


def test_two_runs_of_a_script_are_equal_and_a_run_without_the_hook_is_not(tmp_path: Path) -> None:
    runs = []
    for enabled in (True, True, False):
        cfg = config(tmp_path, steps=tiny.STEPS, ENABLED=enabled)
        cfg.SEED = 5
        runs.append(train_net(cfg))
    losses = [[value for value, _ in run.storage.history("total_loss").values()] for run in runs]
    digests = [truncdet.digest(run.model.state_dict()) for run in runs]
    assert_bitwise_equal(losses[0], losses[1])
    assert digests[0] == digests[1]
    assert abs(losses[0][0] - losses[2][0]) <= 1e-4 and digests[0] != digests[2]


def test_mode_off_is_a_run_without_the_hook(tmp_path: Path) -> None:
    before, probe = surroundings(), Probe("after_step")

    def run(*hooks: HookBase, **values: Any) -> tuple[str, Any]:
        _seed.seed_all(0)
        trainer = train_net(config(tmp_path, **values), *hooks, setup=False)
        return truncdet.digest(trainer.model.state_dict()).hex, trainer.state_dict()

    off, state = run(probe, MODE="off")
    assert probe.seen == [before, before]
    assert off == run(ENABLED=False)[0] != run()[0]
    assert "TruncdetHook" not in state.get("hooks", {})


def test_checkpoints_record_the_mode_and_load_without_the_hook(tmp_path: Path, log: Log) -> None:
    cfg = config(tmp_path, MODE="truncate")
    train_net(cfg, setup=False)
    checkpoint = torch.load(tmp_path / "model_final.pth")
    recorded = {"mode": "truncate", "literal": False, "strict": False}
    assert checkpoint["trainer"]["hooks"]["TruncdetHook"] == {
        "version": truncdet.__version__,
        **recorded,
    }
    without = tiny.trainer(cfg)
    without.resume_or_load(resume=True)
    assert without.start_iter == 2

    def resumed(mode: str) -> list[str]:
        log.messages.clear()
        trainer = tiny.trainer(cfg)
        trainer.register_hooks([TruncdetHook(mode)])
        trainer.resume_or_load(resume=True)
        return list(log.messages)

    assert resumed("truncate") == []
    (message,) = resumed("fixed_point")
    assert "written with {'mode': 'truncate'}, this run has {'mode': 'fixed_point'}" in message


def test_the_table_and_the_notes_go_to_detectron2s_log(tmp_path: Path, log: Log) -> None:
    train_net(config(tmp_path, steps=1), setup=False)
    (message,) = log.messages
    for framework in ("detectron2", "torch "):
        rows = [line for line in message.splitlines() if f"  {framework}" in line]
        assert any("fixed_point" in row and "not covered" not in row for row in rows)
    assert "note: no seed was given" in message
    assert "PYTHONHASHSEED" not in message
    log.messages.clear()
    trainer = tiny.trainer(tiny.config(tmp_path, steps=1))
    trainer.register_hooks([TruncdetHook(verbose=False)])
    trainer.train()
    assert log.messages == []


def test_it_seeds_only_what_nobody_seeded(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "5")  # as default_setup does

    def first_draw(seeded: int) -> torch.Tensor:
        """The first random number that the training itself sees."""
        log.messages.clear()
        drawn = []
        cfg = config(tmp_path, steps=1)
        cfg.SEED = 5
        trainer = tiny.trainer(cfg, seeded)
        state = torch.get_rng_state()
        probe = Probe("before_train")
        trainer.register_hooks([build_hook(cfg), probe])
        probe.look = probe.before_train = lambda: drawn.append(torch.get_rng_state())  # type: ignore[attr-defined]
        trainer.train()
        seeded_now = not torch.equal(drawn[0], state)
        assert seeded_now == (torch.Generator().manual_seed(5).get_state().equal(drawn[0]))
        assert seeded_now == ("the generators were not seeded with 5" in log.messages[0])
        assert "PYTHONHASHSEED counts only if it was set before" in log.messages[0]
        return drawn[0]

    as_default_setup, forgotten = first_draw(5), first_draw(6)
    assert torch.equal(forgotten, torch.Generator().manual_seed(5).get_state())
    assert not torch.equal(as_default_setup, forgotten)


def test_literal_is_in_force_and_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(tmp_path, steps=1, MODE="truncate", LITERAL=True)
    features, boxes = torch.rand(1, 1, 8, 8), torch.tensor([[0.0, 0.1, 0.1, 5.3, 6.7]])
    expected = LAYER.roi_align(features.half().double(), boxes.half().double(), 3).float()
    results = []
    probe = Probe("before_train")
    probe.before_train = lambda: results.append(LAYER.roi_align(features, boxes, 3))  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="literal=True takes features and rois through half"):
        train_net(cfg, probe, setup=False)
    assert_bitwise_equal(results, [expected])


def test_the_evaluation_at_the_end_runs_inside(tmp_path: Path) -> None:
    modes = []

    class Trainer(tiny.TinyTrainer):
        @classmethod
        def test(cls, *args: Any, **kwargs: Any) -> Any:
            modes.append(d2.mode())
            return super().test(*args, **kwargs)

    cfg = config(tmp_path, steps=1)
    _seed.seed_all(0)
    trainer = Trainer(cfg)
    trainer.register_hooks([build_hook(cfg)])
    trainer.train()
    assert modes == ["fixed_point"]
