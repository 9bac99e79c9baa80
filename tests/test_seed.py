"""Seeds reach every generator, and what was there before comes back."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import truncdet
from truncdet import _seed


class Draws(Dataset[torch.Tensor]):
    """Every item is what Python, NumPy and torch draw in the worker."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [index, random.random(), float(numpy.random.rand()), float(torch.rand(()))]
        return torch.tensor(drawn, dtype=torch.float64)


def epoch(seed: int, workers: int) -> torch.Tensor:
    with truncdet.deterministic(seed=seed, mode="off"):
        loader = DataLoader(Draws(), batch_size=2, shuffle=True, num_workers=workers)
        return torch.cat(list(loader))


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_draw_the_same_in_every_run(workers: int) -> None:
    first = epoch(1, workers)
    assert torch.equal(epoch(1, workers), first)
    other = epoch(2, workers)
    # Python, NumPy and torch each follow the seed: none of the columns repeats.
    for column in (1, 2, 3):
        assert not torch.equal(other[:, column], first[:, column])


def test_a_loader_with_its_own_generator_ignores_other_draws() -> None:
    def order(noise: int) -> list[int]:
        torch.rand(noise)
        loader = DataLoader(
            torch.arange(20), shuffle=True, batch_size=None, generator=truncdet.generator(7)
        )
        return [int(item) for item in loader]

    assert order(1) == order(5)
    assert sorted(order(1)) == list(range(20))


def test_seeding_is_that_of_the_libraries_themselves() -> None:
    restore = _seed.saved_states()
    try:
        _seed.seed_all(11)
        ours = random.random(), numpy.random.rand(), torch.rand(())
        random.seed(11), numpy.random.seed(11), torch.manual_seed(11)
        assert ours == (random.random(), numpy.random.rand(), torch.rand(()))
    finally:
        restore()


def test_large_seeds_are_taken() -> None:
    with truncdet.deterministic(seed=2**63 - 1, mode="off"):
        pass


def test_states_come_back_exactly() -> None:
    restore = _seed.saved_states()
    expected = random.random(), numpy.random.rand(), torch.rand(4)
    restore()
    _seed.seed_all(0)
    random.random(), numpy.random.rand(3), torch.rand(5)
    restore()
    assert random.random() == expected[0]
    assert numpy.random.rand() == expected[1]
    assert torch.equal(torch.rand(4), expected[2])
    restore()


def test_it_works_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = _seed.saved_states()
    monkeypatch.setitem(sys.modules, "numpy", None)
    state = numpy.random.get_state()[1].tolist()
    without = _seed.saved_states()
    _seed.seed_all(3)
    without()
    assert numpy.random.get_state()[1].tolist() == state
    monkeypatch.undo()
    restore()


def test_cuda_gets_the_users_seed_back_if_it_had_no_state_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(21)
    with truncdet.deterministic(seed=4, mode="off"):
        assert seeds == [4]
    assert seeds == [4, 21]
    torch.set_rng_state(state)


def test_cuda_states_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: calls.append(seed))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["state"])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", calls.append)
    with truncdet.deterministic(seed=4, mode="off"):
        pass
    assert calls == [4, ["state"]]


@pytest.mark.cuda
def test_cuda_draws_repeat_and_the_state_comes_back_on_the_device() -> None:
    torch.cuda.init()
    before = torch.cuda.get_rng_state_all()
    drawn = []
    for _ in range(2):
        with truncdet.deterministic(seed=4, mode="off"):
            drawn.append(torch.rand(5, device="cuda"))
    assert torch.equal(*drawn)
    for old, new in zip(before, torch.cuda.get_rng_state_all(), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("value", [None, "", "random"])
def test_an_unset_hash_seed_is_said(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", value)
    assert "PYTHONHASHSEED is not set" in str(_seed.hash_seed_note())
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert _seed.hash_seed_note() is None


def test_wrong_seeds_are_named() -> None:
    with pytest.raises(TypeError, match=r"generator: seed must be an int, got 1\.0"):
        truncdet.generator(1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"generator: seed must be in \[0, 2\^63\), got -3"):
        truncdet.generator(-3)
