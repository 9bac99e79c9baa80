"""mmdet's Runner on the tiny set: plain against reproducible, order of RoIs, checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import _mmdet_needed  # noqa: F401
import _mmdet_tiny as tiny
import pytest
import torch
from mmcv.ops.nms import NMSop
from truncdet.integrations import mmdet as mm
from truncdet.integrations._mmcv_table import nms
from truncdet.integrations._substitute import apply_of

import truncdet
from truncdet import _seed
from truncdet.testing import assert_bitwise_equal

KINDS = tuple(tiny.BASES)
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    restore = _seed.saved_states()
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    restore()
    assert not mm.is_patched()
    assert flags == (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)


@functools.cache
def train(kind: str, way: str = "plain", order: int | None = None, again: int = 0) -> tiny.Training:
    """One run, kept for all tests; `order` seeds a permutation of the RoIs inside every layer."""
    name, _, mode = way.partition(" ")
    if name == "key":
        extractors = ("bbox_roi_extractor", "mask_roi_extractor")
        masks = "mask_head" in tiny.config(kind).model.roi_head
        key = f"dict(deterministic=dict(mode={mode!r}))"
        heads = ", ".join(f"{name}={key}" for name in extractors[: 1 + masks])
        cfg = tiny.config_with(
            kind,
            "custom_imports = dict(imports=['truncdet.integrations.mmdet'])\n"
            f"model = dict(roi_head=dict({heads}))\n",
        )
    else:
        cfg = tiny.config(kind)
    if name == "hook":
        cfg.custom_hooks = [{"type": "TruncdetHook", "mode": mode}]
    patch = mm.patched(mode) if name == "patch" else nullcontext()
    with patch, ties_in_order() if way == "key fixed_point" else nullcontext():
        before = None if order is None else _permute(order)
        return tiny.Training(cfg, before)


def ties_in_order() -> Any:
    """mmcv's nms as the hook and the patch have it; a key of extractors does not reach it.

    torch sorts equal scores in another order with AVX2 and AVX-512 than without.
    """
    return mock.patch.object(NMSop, "apply", apply_of(NMSop, nms))


def _permute(order: int) -> Any:
    return lambda runner: runner.register_hook(tiny.Permuting(order))


def digest(run: tiny.Training) -> str:
    return truncdet.digest(run.state()).hex


@each_kind
def test_the_first_losses_are_those_of_the_plain_run(kind: str) -> None:
    plain, ours = train(kind), train(kind, "hook fixed_point")
    assert len(plain.losses) == len(ours.losses) == tiny.STEPS
    assert plain.losses[0].keys() == ours.losses[0].keys()
    for name, loss in plain.losses[0].items():
        assert abs(ours.losses[0][name] - loss) <= 1e-4, name
    assert digest(plain) != digest(ours)  # so it was not the same code twice


@each_kind
def test_two_runs_have_equal_losses_and_weights(kind: str) -> None:
    first, second = (train(kind, "hook fixed_point", again=i) for i in range(2))
    assert first is not second
    assert_bitwise_equal(first.losses, second.losses)
    assert_bitwise_equal(first.state(), second.state())
    assert digest(first) == digest(second)


@each_kind
def test_the_order_of_the_rois_changes_no_bit(kind: str) -> None:
    expected = train(kind, "hook fixed_point")
    for order in (1, 2):
        permuted = train(kind, "hook fixed_point", order)
        assert_bitwise_equal(permuted.losses, expected.losses)
        assert digest(permuted) == digest(expected)


@each_kind
def test_negative_control_it_changes_bits_of_the_plain_run(kind: str) -> None:
    assert any(digest(train(kind, order=order)) != digest(train(kind)) for order in (1, 2, 3))


@pytest.mark.parametrize("way", ["patch fixed_point", "key fixed_point"])
@pytest.mark.parametrize("kind", ["mask", "groie"])
def test_all_ways_give_the_same_bits(kind: str, way: str) -> None:
    ours, hooked = train(kind, way), train(kind, "hook fixed_point")
    assert_bitwise_equal(ours.losses, hooked.losses)
    assert_bitwise_equal(ours.state(), hooked.state())
    assert digest(train(kind, way, order=1)) == digest(hooked)


@pytest.mark.parametrize("way", ["hook truncate", "key truncate", "patch truncate"])
def test_truncated_runs_are_close_and_keep_their_bits_in_any_order(way: str) -> None:
    plain, ours = train("faster"), train("faster", way)
    assert abs(ours.losses[0]["loss"] - plain.losses[0]["loss"]) <= 1e-4
    assert digest(ours) != digest(plain)
    assert digest(ours) == digest(train("faster", "hook truncate"))
    assert digest(train("faster", way, order=1)) == digest(ours)


@pytest.mark.parametrize("way", ["hook off", "key off", "patch off"])
def test_off_is_the_plain_run_to_the_bit(way: str) -> None:
    plain, ours = train("mask"), train("mask", way)
    assert_bitwise_equal(ours.losses, plain.losses)
    expected, found = plain.checkpoint(), ours.checkpoint()
    for part in ("state_dict", "optimizer"):
        assert_bitwise_equal(found[part], expected[part])
    assert found["meta"].keys() == expected["meta"].keys()
    for mine, theirs in zip(ours.model.modules(), plain.model.modules(), strict=True):
        assert type(mine) is type(theirs)
        assert len(mine._forward_pre_hooks) == len(theirs._forward_pre_hooks)


@pytest.mark.parametrize("kind", ["mask", "groie"])
def test_checkpoints_load_both_ways(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # mmengine 0.10 loads its own checkpoints under no torch from 2.6 on without this.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for source, target in (("plain", "hook fixed_point"), ("hook fixed_point", "plain")):
        written, reader = train(kind, source), tiny.config(kind)
        assert list(written.checkpoint()["state_dict"]) == list(train(kind, target).state())
        if target != "plain":
            reader.custom_hooks = [{"type": "TruncdetHook"}]
        reader.load_from = str(written.checkpoint_path())
        loaded: dict[str, Any] = {}

        def keep(runner: Any, loaded: dict[str, Any] = loaded) -> None:
            runner.register_hook(tiny.AfterLoading(loaded))

        tiny.Training(reader, keep)
        assert_bitwise_equal(loaded, dict(written.state()))


def test_meta_records_the_mode_in_plain_values() -> None:
    meta = train("mask", "hook fixed_point").checkpoint()["meta"]
    assert meta["truncdet"] == {
        "version": truncdet.__version__,
        "mode": "fixed_point",
        "literal": False,
        "strict": False,
    }
    assert train("faster", "hook truncate").checkpoint()["meta"]["truncdet"]["mode"] == "truncate"
    assert "truncdet" not in train("mask").checkpoint()["meta"]


@pytest.mark.parametrize("kind", ["mask", "cascade"])
def test_mmdets_own_evaluation_runs_on_the_swapped_layers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    function = truncdet.roi_align

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(len(args[1]))
        return function(*args, **kwargs)

    run = train(kind, "hook fixed_point")
    monkeypatch.setattr(truncdet, "roi_align", spy)
    metrics = run.runner.test()
    assert calls
    for metric in ("coco/bbox_mAP", "coco/segm_mAP"):
        assert 0 <= metrics[metric] <= 1  # -1 says that there was nothing to evaluate


@pytest.mark.parametrize(("source", "said"), [("plain", 1), ("hook fixed_point", 0)])
def test_a_resumed_run_goes_on_and_says_if_its_bits_are_others(
    source: str, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    cfg = tiny.config("faster", custom_hooks=[{"type": "TruncdetHook"}], resume=True)
    cfg.load_from = str(train("faster", source).checkpoint_path())
    cfg.train_cfg.max_iters = tiny.STEPS + 1
    warned: list[str] = []

    def listen(runner: Any) -> None:
        monkeypatch.setattr(runner.logger, "warning", warned.append)

    run = tiny.Training(cfg, listen)
    assert len(run.losses) == 1
    assert len([text for text in warned if "the checkpoint was written with" in text]) == said
