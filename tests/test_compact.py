"""Sums over few of many cells have the bits of the sums over all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import truncdet
from truncdet import _compact, _embedding, _embedding_bag
from truncdet._index_put import index_put_
from truncdet.testing import assert_bitwise_equal

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def picked(seed: int, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything with as many cells as slices counts as few."""
    monkeypatch.setattr(_compact, "_SMALL", 0)
    monkeypatch.setattr(_compact, "_FEW", 1)


def test_what_is_few() -> None:
    assert _compact.worthwhile(10, 40, 1 << 16)
    assert not _compact.worthwhile(10, 39, 1 << 16)
    assert not _compact.worthwhile(10, 40, (1 << 16) - 1)
    assert not _compact.worthwhile(0, 40, 1 << 16)


def test_equal_cells_have_one_number_and_those_out_of_range_none(device: torch.device) -> None:
    made = _compact.groups(torch.tensor([7, 3, 7, -1, 9, 3, 8, 0]).to(device), 9)
    assert made.cells.tolist() == [7, 3, 7, 0, 0, 3, 8, 0]
    assert made.numbers.tolist() == [2, 1, 2, 0, 0, 1, 3, 0]
    assert made.adding.tolist() == [2, 1, 2, -1, -1, 1, 3, 0]


def entries(kind: str) -> tuple[list[Tensor | None], tuple[int, ...]]:
    rows, columns = picked(1, 6, 30), picked(2, 5, 30)
    return {
        "rows": ([rows - 3], (30, 5, 3)),
        "columns": ([None, columns], (6, 30, 3)),
        "pairs": ([rows, columns], (30, 3)),
        "apart": ([rows, None, picked(3, 3, 30)], (30, 5)),
        "matrix": ([rows.reshape(5, 6)], (5, 6, 5, 3)),
    }[kind]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rows", "columns", "pairs", "apart", "matrix"])
def test_index_put_in_place(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    indices, shape = entries(kind)
    places = [None if i is None else i.to(device) for i in indices]
    x, values = (drawn(n, *s).to(device, dtype) for n, s in ((4, (6, 5, 3)), (5, shape)))
    expected = truncdet.index_put(x, places, values, True)
    for limits in ((1 << 16, 4), (0, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_compact, "_SMALL", limits[0])
            patch.setattr(_compact, "_FEW", limits[1])
            for layout in (x.clone(), x.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
                stride = layout.stride()
                index_put_(layout, places, values)
                assert_bitwise_equal(layout, expected)
                assert layout.stride() == stride


@pytest.mark.usefixtures("few")
def test_cells_that_nothing_reaches_are_not_touched(device: torch.device) -> None:
    x = torch.full((8,), torch.nan, device=device)
    x[:4] = torch.tensor([0.0, -0.0, 1.0, 2.0])
    before = x.clone()
    values = torch.tensor([1.0, torch.inf, torch.nan, 0.0], device=device)
    places = torch.tensor([2, 0, 3, 1], device=device)
    index_put_(x, [places], values)
    assert_bitwise_equal(x, truncdet.index_put(before, [places], values, True))
    assert_bitwise_equal(x[4:], before[4:])
    assert x[:3].tolist() == [torch.inf, 0, 2] and x[3].isnan()
    with pytest.raises(ValueError, match="index_put: indices must be in"):
        index_put_(x.cpu(), [torch.tensor([8])], torch.tensor(1.0))


@pytest.mark.usefixtures("few")
def test_sums_that_cancel_do_not_depend_on_the_order(device: torch.device) -> None:
    rows = picked(7, 3, 40).to(device)
    values = (drawn(8, 40) * 2.0 ** picked(9, 20, 40)).to(device)
    rows, values = torch.cat([rows, rows]), torch.cat([values, -values])
    values[0] += 1
    expected = torch.zeros(80, device=device)
    index_put_(expected, [rows], values)
    assert expected[3:].count_nonzero() == 0 < expected.count_nonzero()
    for seed in range(5):
        order = torch.randperm(80, generator=torch.Generator().manual_seed(seed)).to(device)
        found = torch.zeros(80, device=device)
        index_put_(found, [rows[order]], values[order])
        assert_bitwise_equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("padding", [-1, 0, 2])
def test_tables(
    padding: int,
    scale: bool,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    indices = picked(1, 6, 50).to(device)
    indices[3] = 60  # out of range: left out
    grad, bags = drawn(2, 50, 7).to(device, dtype), drawn(3, 10, 7).to(device, dtype)
    bag = torch.arange(50, device=device) // 5
    weights = drawn(4, 50).to(device, dtype)

    def all_of() -> list[Tensor]:
        shape = (60, 7)
        return [
            _embedding.weight_gradient(grad, indices, 60, padding, scale).to(dtype),
            *(
                _embedding_bag.table_gradient(
                    bags, shape, indices, bag, samples, mode, scale, padding
                )
                for mode, samples in ((0, None), (0, weights), (1, None))
            ),
        ]

    plain = all_of()
    monkeypatch.setattr(_compact, "_SMALL", 0)
    monkeypatch.setattr(_compact, "_FEW", 1)
    for found, expected in zip(all_of(), plain, strict=True):
        assert_bitwise_equal(found, expected)
        assert found.count_nonzero() > 0


def test_a_table_in_parts_is_few_by_its_size() -> None:
    made: list[int] = []
    original = _compact.groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            _embedding, "groups", lambda *args: made.append(len(args[0])) or original(*args)
        )
        table = torch.zeros(1 << 14, 4, requires_grad=True)
        truncdet.embedding(torch.tensor([5, 5, 9]), table).sum().backward()
    assert made == [3]
    assert table.grad is not None and table.grad[:, 0].nonzero().flatten().tolist() == [5, 9]
    assert table.grad[5].tolist() == [2] * 4
