"""Scopes and patches end as they should when something else goes wrong on the way out."""

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torchvision
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from truncdet.integrations import torchvision as tv

import truncdet
from truncdet import TruncdetError, _scopes
from truncdet.testing import assert_bitwise_equal


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    original = torchvision.ops.roi_align
    yield
    assert torchvision.ops.roi_align is original
    assert tv.mode() == "off" and not _scopes.stack


def test_unpatching_under_warnings_as_errors_is_complete(monkeypatch):
    original = torchvision.ops.roi_align
    tv.patch()
    monkeypatch.setattr(torchvision.ops.poolers, "roi_align", lambda *a: 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="replaced by someone else"):
            tv.unpatch()
    assert tv.mode() == "off" and torchvision.ops.roi_align is original
    monkeypatch.setattr(torchvision.ops.poolers, "roi_align", original)
    with tv.patched():
        assert torchvision.ops.roi_align is not original


class Foreign(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_an_outer_scope_ends_though_an_inner_one_fails_to():
    foreign = Foreign()
    benchmark = torch.backends.cudnn.benchmark
    with pytest.raises(TruncdetError), truncdet.deterministic():
        truncdet.enable(strict=True)
        foreign.__enter__()
    foreign.__exit__(None, None, None)
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        mode.__exit__(None, None, None)
    assert not _scopes.stack and not truncdet.disable()
    assert torch.backends.cudnn.benchmark == benchmark


def test_enable_that_cannot_print_leaves_nothing_enabled(monkeypatch):
    def fail(self):
        raise OSError("closed")

    monkeypatch.setattr("truncdet._status.Status.print", fail)
    with pytest.raises(OSError, match="closed"):
        truncdet.enable(verbose=True)
    assert not truncdet.disable()


def test_fake_tensors_pass_through_roi_align():
    boxes = torch.tensor([[0, 0.0, 0, 3, 3]])
    with FakeTensorMode() as mode:
        features = mode.from_tensor(torch.rand(1, 2, 4, 4))
        for pool_mode in ("avg", "max"):
            out = truncdet.roi_align(features, mode.from_tensor(boxes), 2, pool_mode=pool_mode)
            assert out.shape == (1, 2, 2, 2)


def test_truncate_and_snap_return_what_may_be_changed_in_place():
    x = torch.ones(3)
    for y in (truncdet.truncate(x, 24), truncdet.truncate(x, 23), truncdet.snap(x, 3)):
        y += 1
    truncdet.snap(x[:0], 3).add_(1)
    assert_bitwise_equal(x, torch.ones(3))


def test_truncate_and_snap_take_negative_views():
    z = torch.randn(4, generator=torch.Generator().manual_seed(0))
    view = torch.complex(z, z).conj().imag
    assert view.is_neg()
    assert_bitwise_equal(truncdet.truncate(view, 8), truncdet.truncate(-z, 8))
    assert_bitwise_equal(truncdet.snap(view, 4), truncdet.snap(-z, 4))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (complex(0.0, -0.0), 0j),
        (np.float32(-0.0), np.float32(0.0)),
        (np.array([1.0, -0.0]), np.array([1.0, 0.0])),
    ],
)
def test_numbers_and_arrays_compare_by_bits(a, b):
    assert_bitwise_equal(a, a)
    with pytest.raises(AssertionError):
        assert_bitwise_equal(a, b)
    assert_bitwise_equal(complex(float("nan"), 0), complex(float("nan"), 0))


def test_boxes_without_data_are_refused_by_the_raw_operators():
    x, boxes = torch.rand(1, 1, 4, 4), torch.zeros(1, 5, device="meta")
    for operator in (torch.ops.truncdet.roi_align, torch.ops.truncdet.roi_align_max):
        with pytest.raises(RuntimeError, match="boxes must be on the device of the values"):
            operator(x, boxes, 2, 2, 1.0, 2, False)


@pytest.mark.parametrize("content", ["[" * 200000, '{"images": 1}'])
def test_the_demo_calls_an_unusable_file_unusable(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    command = [sys.executable, "-m", "truncdet", "demo", "--steps", "1", "--out", tmp_path / "out"]
    done = subprocess.run(
        [*command, "--data", tmp_path, "--ann", tmp_path / "a.json"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Error: " in done.stderr and "Traceback" not in done.stderr
