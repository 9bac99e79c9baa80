"""The operator library: every `torch.ops.truncdet.*` schema is defined on it, beside its reference.

The compiled extension only adds kernels to these schemas; it is loaded before they are defined, and
the dispatcher falls back to the references for whatever it lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from truncdet import _build as _build  # loads the extension


class _Library(torch.library.Library):
    """Its operators refuse what they have no formula for: tangents and torch.func's transforms."""

    def impl(
        self, op_name: Any, fn: Callable[..., Any], dispatch_key: str = "", **options: Any
    ) -> Any:
        if dispatch_key == "Autograd" and fn is not torch.library.fallthrough_kernel:
            fn = _refusing(str(op_name), fn)
        return super().impl(op_name, fn, dispatch_key, **options)


def _refusing(op_name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
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
            if "setup_context" in str(error) and torch._C._are_functorch_transforms_active():
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


LIB = _Library("truncdet", "FRAGMENT")
