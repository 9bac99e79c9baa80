"""Derivatives that operators have no formula for: an error that names the operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import _C, Tensor
from torch.autograd import forward_ad

from truncdet._errors import TruncdetError


def without_second_derivative(op: str) -> Callable[..., None]:
    """The formula of a backward operator: there is none, and that is said."""

    def formula(*_: Any) -> None:
        raise TruncdetError(f"{op}: a second derivative is not implemented")

    return formula


def refusing(op_name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of autograd's that refuses tangents and torch.func's transforms."""
    name = op_name.rpartition("::")[2].lstrip("_")

    @functools.wraps(kernel)
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # Otherwise autograd would take a tangent for zero. Nearly always there is no level.
        if forward_ad._current_level >= 0 and _has_tangent((*args, *kwargs.values())):
            raise NotImplementedError(
                f"{name}: forward-mode derivatives are not implemented, an argument has a tangent"
            )
        try:
            return kernel(keys, *args, **kwargs)
        except RuntimeError as error:
            if "setup_context" in str(error) and _C._are_functorch_transforms_active():
                raise NotImplementedError(
                    f"{name}: derivatives by torch.func are not implemented; use torch.autograd"
                ) from error
            raise

    return run


def _has_tangent(values: Any) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            if forward_ad.unpack_dual(value).tangent is not None:
                return True
        elif isinstance(value, (list, tuple)) and _has_tangent(value):
            return True
    return False
