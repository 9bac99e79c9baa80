"""mmcv's patch under two owners: each gives back its own, in any order."""

from __future__ import annotations

from collections.abc import Iterator

import _mmdet_needed  # noqa: F401
import pytest
from truncdet.integrations import mmcv
from truncdet.integrations import mmdet as mm


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    yield
    assert (mmcv.mode(), mm.mode(), mm.is_patched()) == ("off", "off", False)
    assert not mmcv.CLAIMS._held


@pytest.mark.parametrize("first", ["mmdet", "mmcv"])
def test_blocks_of_two_owners_may_end_in_the_order_they_began(first: str) -> None:
    blocks = {"mmdet": mm.patched("fixed_point"), "mmcv": mmcv.patched("truncate")}
    mode = {"mmdet": "fixed_point", "mmcv": "truncate"}
    second = "mmcv" if first == "mmdet" else "mmdet"
    blocks[first].__enter__()
    blocks[second].__enter__()
    assert mmcv.mode() == mode[second]
    blocks[first].__exit__(None, None, None)
    assert mmcv.mode() == mode[second]
    blocks[second].__exit__(None, None, None)


def test_unpatching_mmcv_leaves_what_mmdet_holds() -> None:
    mm.patch()
    assert not mmcv.unpatch()
    assert (mmcv.mode(), mm.mode()) == ("fixed_point", "fixed_point")
    assert mm.unpatch()


def test_mmdet_has_the_mode_that_mmcv_has() -> None:
    mm.patch()
    mmcv.patch("truncate")
    assert mm.mode() == "truncate"
    mm.patch()  # the later wish counts
    assert (mm.mode(), mmcv.mode()) == ("fixed_point", "fixed_point")
    assert mmcv.unpatch()
    assert mm.mode() == "fixed_point"
    assert mm.unpatch()


def test_a_patch_of_mmcv_outlives_that_of_mmdet() -> None:
    mm.patch()
    mmcv.patch("truncate")
    assert mm.unpatch()
    assert mmcv.mode() == "truncate"
    assert mmcv.unpatch()


def test_off_in_a_block_holds_inside_other_blocks() -> None:
    with mmcv.patched(), mm.patched("truncate"):
        with mmcv.patched("off"):
            assert (mmcv.mode(), mm.mode()) == ("off", "off")
        assert mm.mode() == "truncate"


def test_unpatching_inside_a_block_ends_with_the_block() -> None:
    with mmcv.patched():
        assert mmcv.unpatch()
        assert mmcv.mode() == "off"
        mmcv.patch("truncate")
        assert mmcv.mode() == "truncate"


def test_after_a_claim_that_failed_every_claim_is_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(recipe: object) -> None:
        raise RuntimeError("planned to fail")

    with mmcv.patched():
        monkeypatch.setattr(mmcv._PATCH, "_plan", fail)
        with pytest.raises(RuntimeError, match="planned"):
            mm.patch("truncate")
        with pytest.raises(RuntimeError, match="planned"):
            mmcv.patch("truncate")
        with pytest.raises(RuntimeError, match="planned"), mm.patched("truncate"):
            pass
        monkeypatch.undo()
        assert (mmcv.mode(), mm.mode()) == ("fixed_point", "off")
