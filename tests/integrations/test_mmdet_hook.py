"""TruncdetHook: from a config, from the command line, its scope, its notes, its errors."""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _mmdet_needed  # noqa: F401
import _mmdet_tiny as tiny
import mmcv.ops
import pytest
import torch
from mmcv.ops.nms import NMSop
from mmdet.registry import MODELS
from mmdet.utils import register_all_modules
from mmengine.config import Config, DictAction
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from truncdet.integrations import aten
from truncdet.integrations import mmcv as mmcv_patch
from truncdet.integrations import mmdet as mm
from truncdet.integrations import torchvision as tv
from truncdet.integrations._aten_table import OPERATORS
from truncdet.integrations._layers import swap_of

import truncdet
from truncdet import _scopes, _seed, _strict

DOTTED = "default_hooks.truncdet.type=truncdet.integrations.mmdet.TruncdetHook"
FLAGS = ("deterministic", "benchmark")
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")


def outside() -> dict[str, Any]:
    """What the scope of a run changes beside the model."""
    flags = {name: getattr(torch.backends.cudnn, name) for name in FLAGS}
    return {
        **flags,
        **{k: os.environ.get(k) for k in ("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")},
        "aten": aten.mode(),
        "mmcv": mmcv_patch.mode(),
    }


def kernels() -> list[str]:
    """The dispatcher's kernels of PyTorch's own operators."""
    ends = ((name, end) for name, operator in OPERATORS.items() for end in operator.forms)
    return [torch._C._dispatch_dump(name + end) for name, end in ends]


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before, restore = (outside(), kernels()), _seed.saved_states()
    yield
    restore()
    assert (outside(), kernels()) == before
    assert not _scopes.stack


class Logger:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str) -> None:
        self.lines.append(text)

    warning = info


def stub(model: torch.nn.Module | None = None, seed: int | None = 3, **more: Any) -> Any:
    """As much of a Runner as the hook looks at."""
    model = detector() if model is None else model
    randomness = {} if seed is None else {"seed": seed}
    return SimpleNamespace(model=model, logger=Logger(), seed=3, _randomness_cfg=randomness, **more)


def detector(kind: str = "mask") -> torch.nn.Module:
    register_all_modules()
    made: torch.nn.Module = MODELS.build(tiny.config(kind).model)
    return made


def modes(model: torch.nn.Module) -> set[str]:
    """The modes of all RoI layers of a model."""
    layers = [layer for extractor in tiny.extractors(model) for layer in extractor.roi_layers]
    swaps = [swap_of(layer) for layer in layers]
    assert layers
    return {"off" if swap is None else swap.recipe.mode for swap in swaps}


@pytest.mark.parametrize("mode", ["fixed_point", "truncate"])
def test_every_layer_is_swapped_and_the_scope_ends_with_the_run(mode: str) -> None:
    hook, runner, before = mm.TruncdetHook(mode=mode), stub(), outside()
    hook.before_run(runner)
    assert modes(runner.model) == {mode}
    assert not mm.is_patched() and not tv.is_patched()  # it is about one model
    assert outside() == {
        "deterministic": True,
        "benchmark": False,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONHASHSEED": "3",
        "aten": "off" if mode == "truncate" else mode,
        "mmcv": "off" if mode == "truncate" else mode,
    }
    hook.after_run(runner)
    assert outside() == before
    hook.after_run(runner)  # a second end changes nothing


def test_pytorchs_own_operators_are_covered_for_the_run_and_no_longer() -> None:
    rows, values = torch.tensor([0, 0, 0]), torch.tensor([1.0, 2.0**-24, 2.0**-24])
    orders = (torch.arange(3), torch.arange(2, -1, -1))

    def sums() -> set[float]:
        return {torch.zeros(1).index_put((rows,), values[o], True).item() for o in orders}

    before = kernels()
    assert len(sums()) == 2
    hook, runner = mm.TruncdetHook(strict=True), stub(torch.nn.Linear(1, 1))
    hook.before_run(runner)
    assert sums() == {1 + 2.0**-23} and kernels() != before
    hook.after_run(runner)
    assert len(sums()) == 2 and kernels() == before
    with aten.patched():
        inside = aten.mode()
        hook.before_run(runner)
        hook.after_run(runner)
        assert aten.mode() == inside


def test_equal_scores_keep_their_order_for_the_run_and_no_longer() -> None:
    corners = 10 * torch.arange(200.0)[:, None]
    boxes, scores = torch.cat([corners, corners, corners + 5, corners + 5], 1), torch.ones(200)
    before = vars(NMSop).get("apply")
    hook, runner = mm.TruncdetHook(verbose=False), stub(torch.nn.Linear(1, 1))
    hook.before_run(runner)
    assert mmcv.ops.nms(boxes, scores, 0.5)[1].tolist() == list(range(200))
    hook.after_run(runner)
    assert vars(NMSop).get("apply") is before
    with mmcv_patch.patched("truncate"):
        hook.before_run(runner)
        hook.after_run(runner)
        assert mmcv_patch.mode() == "truncate"


def test_a_scope_that_outlives_the_run_keeps_them_covered() -> None:
    hook, runner = mm.TruncdetHook(verbose=False), stub(torch.nn.Linear(1, 1))
    hook.before_run(runner)
    with truncdet.deterministic(frameworks=["torch"]):
        hook.after_run(runner)
        assert aten.is_patched()
    assert not aten.is_patched()


def test_off_does_nothing_at_all() -> None:
    hook, runner, before = mm.TruncdetHook(mode="off", strict=True), stub(), outside()
    checkpoint: dict[str, Any] = {"meta": {}}
    hook.before_run(runner)
    hook.before_save_checkpoint(runner, checkpoint)
    hook.after_load_checkpoint(runner, checkpoint)
    assert (outside(), runner.logger.lines, checkpoint) == (before, [], {"meta": {}})
    assert modes(runner.model) == {"off"}
    hook.after_run(runner)


def test_off_leaves_layers_that_have_a_mode_of_their_own() -> None:
    cfg = tiny.config("faster").model
    cfg.roi_head.bbox_roi_extractor.deterministic = {"mode": "truncate"}
    register_all_modules()
    runner = stub(MODELS.build(cfg))
    mm.TruncdetHook(mode="off").before_run(runner)
    assert modes(runner.model) == {"truncate"}
    hook = mm.TruncdetHook()
    hook.before_run(runner)
    hook.after_run(runner)
    assert modes(runner.model) == {"fixed_point"}


def test_wrapped_models_are_unwrapped() -> None:
    hook, model = mm.TruncdetHook(), detector()
    runner = stub(torch.nn.DataParallel(model))
    hook.before_run(runner)
    hook.after_run(runner)
    assert modes(model) == {"fixed_point"}
    assert "\nroi_head.bbox_roi_extractor" in runner.logger.lines[0]


def test_the_table_names_the_layers_and_never_calls_them_uncovered() -> None:
    hook, runner = mm.TruncdetHook(), stub()
    hook.before_run(runner)
    hook.after_run(runner)
    (text,) = runner.logger.lines
    for head in ("bbox", "mask"):
        (line,) = (line for line in text.splitlines() if f"{head}_roi_extractor" in line)
        assert line.startswith(f"roi_head.{head}_roi_extractor.roi_layers (4 RoIAlign)")
        assert "T1 T2 T3o T3c" in line and "truncdet.roi_align" in line
    assert "not covered" not in text  # this model has no other layer that varies
    assert "such as mmcv.ops.deform_conv2d, have no row here" in text
    (line,) = (line for line in text.splitlines() if line.startswith("embedding: backward"))
    assert "patch: truncdet.embedding" in line
    # The note of `status()`, which counts the layers of the process, would repeat the rows.
    assert "truncdet.convert has" not in text and "truncdet.convert has" in str(truncdet.status())
    assert "PYTHONHASHSEED is not set" in text
    hook = mm.TruncdetHook(verbose=False)
    quiet = stub(runner.model)
    hook.before_run(quiet)
    hook.after_run(quiet)
    assert quiet.logger.lines == []


def test_the_table_names_what_it_could_not_swap() -> None:
    cfg = tiny.config("faster").model
    cfg.roi_head.bbox_roi_extractor.roi_layer = {"type": "PrRoIPool", "output_size": 7}
    register_all_modules()
    runner = stub(MODELS.build(cfg))
    hook = mm.TruncdetHook()
    hook.before_run(runner)
    hook.after_run(runner)
    lines = runner.logger.lines[0].splitlines()
    uncovered = [line for line in lines if "not covered" in line]
    pools = [f"roi_head.bbox_roi_extractor.roi_layers.{i}" for i in range(4)]
    assert [line.split("  ")[0] for line in uncovered] == [
        f"{name} (mmcv.ops.prroi_pool.PrRoIPool)" for name in pools
    ]
    retina = stub(torch.nn.Linear(1, 1))
    hook.before_run(retina)
    hook.after_run(retina)
    assert "the model has no layer to swap" in retina.logger.lines[0]


def test_the_table_says_what_computes_other_layers() -> None:
    model = torch.nn.Module()
    model.conv = mmcv.ops.ModulatedDeformConv2dPack(3, 3, 1)
    model.pools = torch.nn.ModuleList([mmcv.ops.RoIPool(3), mmcv.ops.RoIPool(3)])
    for mode, said in (
        ("fixed_point", (("T1", "truncdet.deform_conv2d"), ("T1 T2 T3o T3c", "truncdet.roi_pool"))),
        ("truncate", (("-", "not covered"),) * 3),
    ):
        hook, runner = mm.TruncdetHook(mode=mode), stub(model)
        hook.before_run(runner)
        hook.after_run(runner)
        rows = [line for line in runner.logger.lines[0].splitlines() if "this model" in line]
        assert len(rows) == len(said)
        for row, (tier, by) in zip(rows, said, strict=True):
            assert f"  {tier}  " in row and by in row
            assert ("swapped in" in row) is (mode == "fixed_point")


def test_the_table_names_open_patches_and_not_what_they_leave_open() -> None:
    runner, hook = stub(torch.nn.Linear(1, 1)), mm.TruncdetHook()
    with mm.patched():
        hook.before_run(runner)
        hook.after_run(runner)
    (text,) = runner.logger.lines
    assert "RoIAlign, roi_align (avg and max)" in text and "mask targets" in text
    assert "not covered" not in text


def test_a_seed_that_mmengine_drew_is_named() -> None:
    for seed, said in ((None, True), (3, False)):
        hook, runner = mm.TruncdetHook(), stub(seed=seed)
        hook.before_run(runner)
        hook.after_run(runner)
        assert ("--cfg-options randomness.seed=3" in runner.logger.lines[0]) is said


@pytest.mark.parametrize(("found", "inside"), [("7", "7"), ("random", "3"), ("", "3")])
def test_a_hash_seed_of_the_users_is_kept(
    found: str, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as change:
        change.setenv("PYTHONHASHSEED", found)
        hook, runner = mm.TruncdetHook(), stub()
        hook.before_run(runner)
        assert os.environ["PYTHONHASHSEED"] == inside
        hook.after_run(runner)
        assert os.environ["PYTHONHASHSEED"] == found


def test_an_exception_in_the_run_is_made_good_by_close_or_the_next_run() -> None:
    hook, runner, before = mm.TruncdetHook(), stub(), outside()
    hook.before_run(runner)
    hook.before_run(runner)  # the run before ended in an exception
    hook.after_run(runner)
    assert outside() == before
    hook.before_run(runner)
    hook.close()
    assert outside() == before


def test_a_failing_start_leaves_no_scope_open() -> None:
    before = outside()
    with pytest.raises(TypeError, match=r"model must be an nn\.Module"):
        mm.TruncdetHook().before_run(SimpleNamespace(model=object(), seed=0))
    assert outside() == before


@pytest.mark.parametrize("strict", [True, "warn"])
def test_strict_opens_the_checker_for_the_run(strict: Any) -> None:
    hook, runner = mm.TruncdetHook(strict=strict), stub()
    hook.before_run(runner)
    modes_inside = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert any(isinstance(mode, _strict.StrictMode) for mode in modes_inside)
    hook.after_run(runner)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_enable_around_the_run_stays_in_force() -> None:
    with truncdet.deterministic(frameworks=("mmdet",)):
        hook, runner = mm.TruncdetHook(), stub()
        hook.before_run(runner)
        assert mm.is_patched()
        hook.after_run(runner)
        assert mm.is_patched() and torch.backends.cudnn.deterministic


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"mod": "off"},
            ValueError,
            "keys must be among mode, strict, literal, verbose, got 'mod'",
        ),
        ({"mode": "x"}, ValueError, "mode must be one of fixed_point, truncate, off, got 'x'"),
        ({"mode": "snap"}, ValueError, "mode must not be 'snap'"),
        ({"strict": "yes"}, ValueError, "strict must be"),
        ({"literal": True}, ValueError, "literal must be False unless mode is 'truncate'"),
        ({"mode": "truncate", "literal": "no"}, TypeError, "literal must be True or False"),
    ],
)
def test_errors_list_the_choices(options: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=f"TruncdetHook: {text}"):
        HOOKS.build({"type": "TruncdetHook", **options})


def test_literal_warns() -> None:
    hook, runner = mm.TruncdetHook(mode="truncate", literal=True), stub()
    with pytest.warns(UserWarning, match="coordinates past 2048 pixels move"):
        hook.before_run(runner)
    hook.after_run(runner)
    assert "truncate (literal)" in runner.logger.lines[0]


@pytest.mark.parametrize(
    ("meta", "resume", "warned"),
    [
        ({}, True, "mode"),
        ({"truncdet": {"version": "0", "mode": "truncate", "literal": False}}, True, "truncate"),
        ({"truncdet": {"version": "0", "mode": "fixed_point", "strict": False}}, True, None),
        ({}, False, None),
    ],
)
def test_resuming_with_other_settings_warns(meta: Any, resume: bool, warned: str | None) -> None:
    runner = stub(torch.nn.Linear(1, 1), _resume=resume)
    mm.TruncdetHook().after_load_checkpoint(runner, {"meta": meta})
    assert len(runner.logger.lines) == (warned is not None)
    assert warned is None or warned in runner.logger.lines[0]


def merged(kind: str, *options: str) -> Any:
    """A config as tools/train.py makes it from its file and its command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg-options", nargs="+", action=DictAction)
    return tiny.config(kind, **parser.parse_args(["--cfg-options", *options]).cfg_options)


@pytest.mark.parametrize("mode", ["fixed_point", "truncate", "off"])
def test_the_command_line_alone_is_enough(mode: str) -> None:
    run = tiny.Training(merged("faster", DOTTED, f"default_hooks.truncdet.mode={mode}"))
    assert modes(run.model) == {mode}
    meta = run.checkpoint()["meta"]
    assert meta.get("truncdet", {"mode": "off"})["mode"] == mode


def test_hooks_that_copy_the_model_before_the_run_copy_swapped_layers() -> None:
    seen = []

    class Copying(Hook):
        def before_run(self, runner: Any) -> None:
            seen.append(modes(copy.deepcopy(runner.model)))

    cfg = tiny.config("faster", custom_hooks=[{"type": "TruncdetHook"}])
    tiny.Training(cfg, lambda runner: runner.register_hook(Copying()))
    assert seen == [{"fixed_point"}]


def test_a_pure_python_config_can_import_it(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text(
        "from truncdet.integrations.mmdet import TruncdetHook\n"
        "custom_hooks = [dict(type=TruncdetHook, mode='truncate')]\n"
    )
    (hook,) = Config.fromfile(path).custom_hooks
    assert HOOKS.build(hook).mode == "truncate"


def test_an_unknown_key_on_the_command_line_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="keys must be among mode, strict, literal, verbose"):
        tiny.Training(merged("faster", DOTTED, "default_hooks.truncdet.moode=off"))


def test_the_table_reaches_the_log_of_a_real_run() -> None:
    run = tiny.Training(merged("faster", DOTTED, "log_level=INFO"))
    logs = list(Path(run.runner.log_dir).glob("*.log"))
    assert len(logs) == 1 and "4 RoIAlign" in logs[0].read_text()


def test_mmdets_own_train_script_takes_an_untouched_config(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(tiny.TRAIN_SCRIPT), str(tiny.config_file("mask"))]
    command += ["--work-dir", str(tmp_path), "--cfg-options", "log_level=INFO", DOTTED]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mask_roi_extractor.roi_layers (4 RoIAlign)" in done.stdout + done.stderr
    written = torch.load(tmp_path / f"iter_{tiny.STEPS}.pth", weights_only=False)
    assert written["meta"]["truncdet"]["mode"] == "fixed_point"
    here = tiny.Training(merged("mask", DOTTED)).checkpoint()
    assert truncdet.digest(dict(written["state_dict"])) == truncdet.digest(dict(here["state_dict"]))
