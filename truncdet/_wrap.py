"""`wrap`: a kernel we do not own, run in double between two roundings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from truncdet._box import Recipe
from truncdet._crossing import Rounding


class _Counts:
    """What certification counted; shared by both kinds of wrapper."""

    recipe: Recipe

    @property
    def unproved(self) -> list[Tensor]:
        """Cells that could not be proved: per backward one 0-d int64 tensor on its device."""
        return self.recipe.unproved

    def unproved_cells(self) -> int:
        """Returns the sum of all counts so far; this waits for the device."""
        return sum(int(count) for count in self.recipe.unproved)

    def reset_unproved(self) -> None:
        """Forgets the counts."""
        self.recipe.unproved.clear()


class WrappedFunction(_Counts):
    """A callable run in double between two roundings; made by `wrap`."""

    def __init__(self, function: Callable[..., Any], recipe: Recipe) -> None:
        functools.update_wrapper(self, function, updated=())
        self.wrapped = function
        self.recipe = recipe

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.recipe.run(self.wrapped, args, kwargs)

    def __repr__(self) -> str:
        return f"wrap({self.wrapped!r})"


# What a module keeps its state in. Shared with the wrapper, so that both always see the same.
_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class WrappedModule(_Counts, nn.Module):
    """A module run in double between two roundings; made by `wrap`.

    It stands in for the module rather than holding it as a child: parameters, buffers and
    children are the same dicts, so names and state_dict keys are unchanged, and attributes it
    does not have are the module's. Its parameters keep their dtype.
    """

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        for name in _SHARED:
            self.__dict__[name] = module.__dict__[name]
        # Past nn.Module.__setattr__, which would register a child and change the keys.
        self.__dict__["wrapped"] = module
        self.recipe = recipe
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.recipe.run(self.wrapped, args, kwargs, self.wrapped)

    def __getattr__(self, name: str) -> Any:
        if "wrapped" not in self.__dict__:  # while being unpickled
            raise AttributeError(name)
        return getattr(self.__dict__["wrapped"], name)

    def train(self, mode: bool = True) -> WrappedModule:
        self.wrapped.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> WrappedModule:
        self.wrapped._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.wrapped._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.wrapped._load_from_state_dict(*args)

    def __repr__(self) -> str:
        return f"wrap({self.wrapped!r})"


def wrap(
    callable_or_module: Callable[..., Any],
    bits: Rounding = 11,
    grad_bits: Rounding = 11,
    compute_dtype: torch.dtype = torch.float64,
    truncate_args: tuple[int | str, ...] = (0,),
    certify: bool = False,
    weights: str | None = None,
    *,
    n: int | Callable[..., int] | None = None,
) -> Any:
    """Runs a black box in double on inputs of few bits, and rounds its gradients.

    Tier T0, probable and not proved: two orders of a double sum rarely round to different
    11-bit numbers, though they do round to different float32 ones now and then. Good for long
    runs, guaranteed for none; `certify` counts what it could not prove.

    Arguments at `truncate_args` are rounded; all other floating tensors, in nested lists, tuples
    and dicts too, are only widened (boxes must never be rounded), and so are a module's
    parameters and buffers. Every gradient that leaves the box, of parameters too, is rounded to
    `grad_bits`. Outputs are only narrowed to the caller's dtype. Autocast is off inside. Buffers
    that a module changes in place are kept; one that it binds to a new tensor is not.

    Example:
        >>> roi_align = wrap(torchvision.ops.roi_align)
        >>> features, boxes = torch.rand(1, 3, 8, 8), torch.tensor([[0.0, 1.0, 1.0, 6.0, 7.0]])
        >>> roi_align(features, boxes, output_size=7).dtype
        torch.float32

    Args:
        callable_or_module: function of tensors, or nn.Module.
        bits: significant bits the selected arguments keep; torch.float16 or torch.bfloat16 for
            the literal cast of the published recipe; None to keep all.
        grad_bits: the same for gradients on their way back.
        compute_dtype: dtype inside the box, float64 or float32.
        truncate_args: positions and keyword names of the arguments to round.
        certify: count in each backward the cells whose rounded gradient some order of the sum
            might change. Runs the box's backward twice: for debugging and CI.
        weights: must be 'nonnegative' with `certify`: you state that the backward gives each
            cell a sum of incoming gradients times fixed weights >= 0, as RoIAlign does.
        n: bound on the number of contributions to one cell, an int or a function of the call's
            arguments. Default: elements of the incoming gradient, right if each is added to a
            cell at most once. A kernel that adds per sample (RoIAlign) needs the number of
            RoIs x bins x samples.

    Returns:
        A callable with the same arguments, returning floating outputs in the dtype of the first
        rounded argument; for a module a module with the same state_dict keys. With `certify`,
        `.unproved` lists one 0-d count per backward, `.unproved_cells()` reads their sum (this
        waits for the device) and `.reset_unproved()` clears them.

    Raises:
        TypeError: an argument is of a wrong type, or no floating tensor is selected in a call.
        ValueError: a value is out of range, or `certify` lacks weights='nonnegative' or float64.
    """
    if not callable(callable_or_module):
        raise TypeError(
            f"wrap: callable_or_module must be callable, got {type(callable_or_module).__name__}"
        )
    module = callable_or_module if isinstance(callable_or_module, nn.Module) else None
    recipe = Recipe(
        callable_or_module if module is None else module.forward,
        bits=bits,
        grad_bits=grad_bits,
        dtype=compute_dtype,
        selected=truncate_args,
        certify=certify,
        weights=weights,
        n=n,
    )
    if module is None:
        return WrappedFunction(callable_or_module, recipe)
    return WrappedModule(module, recipe)
