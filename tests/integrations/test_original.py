"""A wrapper in the place of torchvision's function: refused by name, and never taken for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from test_torchvision import ORIGINAL, scene
from torchvision.ops import RoIAlign
from truncdet.integrations import torchvision as tv
from truncdet.integrations._original import check_original

import truncdet
from truncdet.testing import assert_bitwise_equal

MODULE = sys.modules["torchvision.ops.roi_align"]
REFUSED = r"torchvision\.ops\.roi_align\.roi_align must be torchvision's own roi_align .*, got <"


def wrapper(*args: Any, **kwargs: Any) -> Any:
    return ORIGINAL(*args, **kwargs)


@functools.wraps(ORIGINAL)
def disguised(*args: Any, **kwargs: Any) -> Any:
    return ORIGINAL(*args, **kwargs)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """As in a process that has not patched yet; the replacement of before is back afterwards."""
    kept = tv._replacement
    with mock.patch.object(tv, "_replacement", functools.cache(kept.__wrapped__)):
        yield
        assert not tv.is_patched()
    assert vars(MODULE)["roi_align"] is ORIGINAL


def covered() -> bool:
    features, boxes, _ = scene()
    layer, ours = RoIAlign(3, 0.5, 2), truncdet.roi_align(features, boxes, 3, 0.5, 2)
    with mock.patch.object(truncdet, "roi_align", wraps=truncdet.roi_align) as called:
        assert_bitwise_equal(layer(features, boxes), ours)
    return bool(called.called)


@pytest.mark.parametrize("foreign", [wrapper, disguised])
@pytest.mark.parametrize("mode", ["fixed_point", "truncate"])
def test_it_is_refused_by_name_and_not_kept(foreign: Any, mode: str) -> None:
    with mock.patch.object(MODULE, "roi_align", foreign):
        with pytest.raises(truncdet.TruncdetError, match=REFUSED + f"function {foreign.__name__}"):
            tv.patch(mode)
        assert (tv.mode(), vars(MODULE)["roi_align"]) == ("off", foreign)
    assert tv._replacement().__wrapped__ is ORIGINAL
    with tv.patched():
        assert covered()


def test_one_that_comes_after_a_first_patch_is_refused() -> None:
    with tv.patched():
        assert covered()
    with mock.patch.object(MODULE, "roi_align", wrapper):
        with pytest.raises(truncdet.TruncdetError, match=REFUSED):
            tv.patch()
        assert not tv.is_patched()


def test_convert_uses_the_function_under_the_wrapper() -> None:
    features, boxes, _ = scene()
    expected = truncdet.wrap(ORIGINAL)(features, boxes, 3, 0.25, 2, False)
    layer = RoIAlign(3, 0.25, 2)
    with mock.patch.object(MODULE, "roi_align", mock.Mock(side_effect=AssertionError)):
        truncdet.convert(layer, "truncate")
        assert_bitwise_equal(layer(features, boxes), expected)


def test_what_wraps_our_own_replacement_may_stand() -> None:
    ours = tv._replacement()
    around = functools.wraps(ours)(lambda *args: ours(*args))
    with mock.patch.object(MODULE, "roi_align", around), tv.patched():
        assert covered()


def test_where_no_function_is_left_that_is_said() -> None:
    with mock.patch.multiple(tv, _IMPORTERS=()), mock.patch.object(MODULE, "roi_align", 3):
        with pytest.raises(truncdet.TruncdetError, match=r"own roi_align to be patched, got 3"):
            tv.patch()
    with mock.patch.dict(sys.modules, {"somewhere": torch}):
        with pytest.raises(truncdet.TruncdetError, match=r"me: somewhere\.roi_align .*, got None"):
            check_original("somewhere", lambda found: False, object(), "me")
