"""A wrapper in the place of mmcv's function: refused by name, and never taken for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from _mmcv_cases import HELD, MMCVS, differs, original, run
from truncdet.integrations import mmcv as integration

import truncdet
from truncdet.testing import assert_bitwise_equal

MODULE = sys.modules["mmcv.ops.roi_align"]
REFUSED = r"mmcv\.ops\.roi_align\.roi_align must be mmcv's own roi_align .*, got <function wrapper"


def wrapper(*args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """As in a process that has not patched yet."""
    kept = integration._replacement
    with mock.patch.object(integration, "_replacement", functools.cache(kept.__wrapped__)):
        yield
        assert not integration.is_patched()
    assert vars(MODULE)["roi_align"] is HELD[0]


def assert_covered() -> None:
    with integration.patched():
        assert integration.mode() == "fixed_point"
        for name, way in MMCVS.items():
            assert not differs(way), name


def assert_refused() -> None:
    with pytest.raises(truncdet.TruncdetError, match=REFUSED):
        integration.patch()
    assert (integration.mode(), vars(MODULE)["roi_align"]) == ("off", wrapper)


def test_it_is_refused_by_name_and_not_kept() -> None:
    with mock.patch.object(MODULE, "roi_align", wrapper):
        assert_refused()
    assert_covered()


def test_one_that_comes_after_a_first_patch_is_refused() -> None:
    assert_covered()
    with mock.patch.object(MODULE, "roi_align", wrapper):
        assert_refused()
    assert_covered()


def test_convert_uses_the_function_under_the_wrapper() -> None:
    layer, plain = (MODULE.RoIAlign((3, 2), 0.5, 2) for _ in range(2))
    with integration.patched("truncate"):
        expected = run(plain)
    with mock.patch.object(MODULE, "roi_align", mock.Mock(side_effect=AssertionError)):
        integration._replacement.cache_clear()
        truncdet.convert(layer, "truncate")
        assert_bitwise_equal(run(layer), expected)


def test_what_wraps_our_own_replacement_may_stand() -> None:
    ours = integration._replacement()
    around = functools.wraps(ours)(lambda *args: ours(*args))
    with mock.patch.object(MODULE, "roi_align", around):
        assert_covered()


def test_an_equal_method_that_somebody_put_there_is_covered() -> None:
    again = MODULE.RoIAlignFunction.apply
    assert again is not HELD[0]
    with mock.patch.object(MODULE, "roi_align", again):
        assert_covered()
