"""index_put and put under the patch: what is summed, what is left alone, and wrong calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from _aten_draw import Draw, assert_same_error, assert_same_kind
from torch import Tensor
from truncdet.integrations import aten

import truncdet
from truncdet import _sticky
from truncdet.testing import assert_bitwise_equal

INDEX = torch.tensor([0, 1, 1, 0])
SOURCE = torch.tensor([1.0, 2.0, 3.0, 2.0**-25])
# Magnitudes so far apart that a sum in fixed point loses the small ones.
SPREAD = torch.tensor([1e30, 1e-30, 3.0, -1e-12])

put_ = torch.ops.aten.index_put_


@pytest.fixture(autouse=True)
def off_afterwards() -> Iterator[None]:
    yield
    assert not aten.is_patched()


def long(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


MASK = torch.tensor([[True, False, True], [True, True, False]])

# Indices into [2, 3, 4], and the shape of what they name.
KINDS: dict[str, tuple[list[Tensor | None], list[int]]] = {
    "rows": ([long(0, 1, 1)], [3, 3, 4]),
    "columns": ([None, long(0, -1, 0, 2)], [2, 4, 4]),
    "behind": ([None, None, long([1, 1], [1, -4])], [2, 3, 2, 2]),
    "pairs": ([long(0, 0, 1), long(2, 2, 0)], [3, 4]),
    "apart": ([long(0, 0, 1), None, long(3, 3, 0)], [3, 3]),
    "broadcast": ([long([0], [1], [0]), long(1, 1)], [3, 2, 4]),
    "all": ([long(0, 0), long(1, 1), long(2, 2)], [2]),
    "mask and places": ([MASK, long(1, 1, 1, 0)], [4]),
    "a mask of bytes and places": ([None, long(1, 0, 1).to(torch.uint8), long(1, 1)], [2, 2]),
    "32 bits": ([long(0, 1, 1).int()], [3, 3, 4]),
    "none": ([long(), None], [0, 3, 4]),
}


@pytest.mark.parametrize("values", ["whole", "one row", "a scalar"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_indices_have_truncdets_bits(
    kind: str, values: str, device: torch.device
) -> None:
    draw = torch.Generator().manual_seed(0)
    indices, shape = KINDS[kind]
    places = [None if i is None else i.to(device) for i in indices]
    shape = {"whole": shape, "one row": shape[-1:], "a scalar": []}[values]
    source = torch.randn(shape, generator=draw).to(device)
    x = torch.randn(2, 3, 4, generator=draw).to(device)
    expected = truncdet.index_put(x, places, source, True)
    plain = torch.ops.aten.index_put(x, places, source, True)
    with aten.patched():
        assert_bitwise_equal(torch.ops.aten.index_put(x, places, source, True), expected)
        assert_bitwise_equal(put_(x.clone(), places, source, True), expected)
    torch.testing.assert_close(expected, plain)


@pytest.mark.parametrize(
    "indices",
    [
        (long(1, 0, 1, 1).bool(),),
        (long(1, 0, 1, 1).to(torch.uint8),),
        (long(2),),
        (torch.tensor(2),),
        (torch.tensor([[True, True]] * 2),),
    ],
)
def test_where_nothing_is_summed_the_result_stays_exact(indices: tuple[Tensor, ...]) -> None:
    x = SPREAD.reshape(2, 2) if indices[0].dim() == 2 else SPREAD

    def both() -> list[Tensor]:
        leaf = torch.zeros_like(x, requires_grad=True)
        added = torch.index_put(x, indices, x[indices], True)
        return [torch.autograd.grad(leaf[indices], leaf, x[indices])[0], added]

    with aten.patched():
        found = both()
    for ours, plain in zip(found, both(), strict=True):
        assert_bitwise_equal(ours, plain)
    assert_bitwise_equal(found[0][indices], x[indices])


def test_assignments_are_the_originals() -> None:
    x, version = torch.zeros(4), 0
    with aten.patched():
        x[INDEX[:2]] = SPREAD[:2]
        x[2:][long(1, 0).bool()] = 7.0
        version = x._version
        x.put_(long(3), long(9).float())
    assert x.tolist() == [SPREAD[0], SPREAD[1], 7, 9] and x._version == version + 1


def test_in_place_the_input_changes_once_and_keeps_its_layout() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).t()
    expected = truncdet.index_put(x, [INDEX], SOURCE[:, None], True)
    with aten.patched():
        version, stride = x._version, x.stride()
        assert x.index_put_((INDEX,), SOURCE[:, None], accumulate=True) is x
        assert (x._version, x.stride()) == (version + 1, stride)
        assert_bitwise_equal(x, expected)
        flat = x.reshape(-1)
        assert flat.put_(INDEX, SOURCE, accumulate=True) is flat


WRONG: dict[str, Callable[[], Any]] = {
    "index out of range": lambda: torch.zeros(2).index_put_((long(0, 2),), SOURCE[:2], True),
    "index out of range from the end": lambda: torch.index_put(
        torch.zeros(2), (long(0, -3),), SOURCE[:2], True
    ),
    "another dtype": lambda: torch.zeros(2).index_put_((INDEX,), SOURCE.double(), True),
    "values of another shape": lambda: torch.zeros(2).index_put_((INDEX,), SOURCE[:3], True),
    "too many indices": lambda: torch.zeros(2).index_put_((INDEX, INDEX), SOURCE, True),
    "indices that do not broadcast": lambda: torch.zeros(2, 2).index_put_(
        (INDEX, INDEX[:3]), SOURCE, True
    ),
    "no indices": lambda: torch.ops.aten.index_put_(torch.zeros(2), [], SOURCE, True),
    "float indices": lambda: torch.zeros(2).index_put_((SOURCE,), SOURCE, True),
    "a mask of another shape": lambda: torch.zeros(3).index_put_(
        (long(1, 0).bool(),), torch.tensor(1.0), True
    ),
    "values that are the input": lambda: (lambda x: x.index_put_((INDEX,), x, True))(
        SOURCE.clone()
    ),
    "indices that are the input": lambda: (
        lambda x: x.view(torch.float64).index_put_((x,), torch.tensor(1.0).double(), True)
    )(long(0, 0)),
    "put: index out of range": lambda: torch.zeros(2).put_(long(0, 2), SOURCE[:2], True),
    "put: another dtype": lambda: torch.zeros(2).put_(INDEX, SOURCE.double(), True),
    "put: another number": lambda: torch.zeros(2).put_(INDEX, SOURCE[:3], True),
    "put: 32 bits": lambda: torch.zeros(2).put_(INDEX.int(), SOURCE, True),
    "put: one element for all": lambda: torch.zeros(1).expand(2).put_(INDEX, SOURCE, True),
    "put: values that are the input": lambda: (lambda x: x.put_(INDEX, x, True))(SOURCE.clone()),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises_the_very_error_that_it_does_without_the_patch(name: str) -> None:
    assert_same_error(WRONG[name])


def test_an_input_with_one_element_for_all_is_left_to_the_original() -> None:
    def put() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.zeros(1).expand(2).index_put_((INDEX,), SOURCE, accumulate=True).clone()

    plain = put()
    with aten.patched():
        assert_bitwise_equal(put(), plain)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_integers_and_complex_numbers_are_the_originals(dtype: torch.dtype) -> None:
    x, source = torch.ones(2).to(dtype), SOURCE.to(dtype)

    def both() -> list[Tensor]:
        put = [] if dtype == torch.bool else [x.clone().put_(INDEX, source, accumulate=True)]
        return [torch.index_put(x, (INDEX,), source, accumulate=True), *put]

    plain = both()
    with aten.patched():
        for found, expected in zip(both(), plain, strict=True):
            assert_bitwise_equal(found, expected)


def _entries(draw: Draw, shape: list[int]) -> list[Tensor | None]:
    """An index, None, or now and then a mask for each of the first dimensions."""
    n = draw.number(0, 4)
    entries: list[Tensor | None] = []
    for size in shape[: draw.number(0, 3)]:
        mask = torch.arange(size + draw.one_of(*[0] * 9, 1)) % 2 == 0
        entries.append(draw.one_of(draw.index([n], size), draw.index([n], size), None, mask))
    return entries


def test_random_calls_succeed_and_fail_as_they_do_without_the_patch() -> None:
    draw, worked = Draw(3), 0
    floats = (torch.float32,) * 8 + (torch.float16, torch.int64)
    for _ in range(600):
        shape = [draw.number(0, 3) for _ in range(draw.number(0, 3))]
        x, entries = draw.tensor(shape, *floats), _entries(draw, shape)
        try:
            named = list(torch.ops.aten.index(x, entries).shape)
        except (IndexError, RuntimeError):
            named = [draw.number(0, 3)]
        values = draw.tensor(draw.shape(*draw.one_of(named, named, named[-1:], [])), *floats)

        def call(
            x: Tensor = x, entries: Sequence[Tensor | None] = entries, values: Tensor = values
        ) -> Tensor:
            added: Tensor = put_(x.clone(), entries, values, True)
            return added

        worked += assert_same_kind(call, (x.shape, x.dtype, entries, values.shape, values.dtype))
    assert 100 < worked < 500


def test_a_call_reports_what_an_earlier_one_met(monkeypatch: pytest.MonkeyPatch) -> None:
    def pending() -> None:
        raise truncdet.TruncdetError("met before")

    monkeypatch.setattr(_sticky, "raise_pending", pending)
    with aten.patched(), pytest.raises(truncdet.TruncdetError, match="met before"):
        torch.zeros(2).index_put_((INDEX,), SOURCE, accumulate=True)


def test_derivatives_keep_autograds_formulas() -> None:
    x = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    source = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    with aten.patched():
        for function in (
            lambda x, s: x[INDEX] * s,
            lambda x, s: x.index_put((INDEX,), s, accumulate=True).square(),
            lambda x, s: x.index_put((INDEX,), s[0], accumulate=True).square(),
            lambda x, s: x.take(INDEX) * s[:, 0],
            lambda x, s: x.put(INDEX, s[:, 0], accumulate=True).square(),
        ):
            assert torch.autograd.gradcheck(function, (x, source), nondet_tol=0.0)
            assert torch.autograd.gradgradcheck(function, (x, source), nondet_tol=0.0)


def test_vmap_and_functorch_reach_the_kernel() -> None:
    x = torch.zeros(3, 2)
    source = torch.stack([SOURCE, -SOURCE, SOURCE.flip(0)])
    with aten.patched():
        slopes = torch.func.vmap(torch.func.grad(lambda a, s: (a[INDEX] * s).sum()))(x, source)
        added = torch.func.vmap(lambda a, s: a.index_put((INDEX,), s, True))(x, source)
    expected = [truncdet.index_put(torch.zeros(2), [INDEX], s, True) for s in source]
    assert_bitwise_equal(added, torch.stack(expected))
    assert_bitwise_equal(slopes, torch.stack(expected))


@pytest.mark.cuda
def test_what_pytorch_moves_to_the_gpu_is_moved() -> None:
    x, source = torch.zeros(2).cuda(), SOURCE.cuda()
    with aten.patched():
        indexed = torch.index_put(x, (INDEX,), source, accumulate=True)
        scalar = torch.index_put(x, (INDEX.cuda(),), torch.tensor(2.0), accumulate=True)
    assert_bitwise_equal(indexed, truncdet.index_put(x, [INDEX.cuda()], source, True))
    assert scalar.tolist() == [4, 4]


@pytest.mark.cuda
def test_on_a_gpu_an_index_out_of_range_is_dropped_and_reported_by_the_next_call() -> None:
    x = torch.zeros(2, device="cuda")
    with aten.patched():
        x.index_put_((long(0, 2).cuda(),), torch.ones(2, device="cuda"), accumulate=True)
        with pytest.raises(truncdet.TruncdetError, match="index_put"):
            truncdet.check()
    assert x.tolist() == [1, 0]
