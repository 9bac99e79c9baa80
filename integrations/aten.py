"""PyTorch's own operators: gradients of resampling and embeddings, sums by index, losses.

The dispatcher's CPU and CUDA kernels are overridden, so functions, methods, in-place forms, other
libraries, TorchScript and references taken before the patch all reach ours, and so do gradients
that are made of these operators: those of gather, take_along_dim, index_select, take and x[index].
Above the kernels nothing changes: autograd's formulas, autocast, functionalization, vmap, meta and
fake tensors. What counts is the patch at the time a kernel runs, for a gradient that of its
*backward*.

Calls that truncdet has no definition for (integers, complex numbers, products and extrema, wrong
arguments) run the original kernel, and so do those that add nothing, such as an index_put by one
mask. So does ctc_loss by cuDNN. topk is left out: which of equal elements it takes is PyTorch's
choice, and other elements than those would surprise; `truncdet.topk` has to be called by name.

Code of torch.compile is covered where it calls these operators when it runs: all of it with the
backend 'eager'; with 'aot_eager' too, where interpolation becomes multiplications and an index_put,
which repeats but has other bits than truncdet.interpolate; and nothing for which 'inductor'
generates code of its own, its atomics for scatter_add among it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from truncdet.integrations._aten_table import BY_NAME, OPERATORS
from truncdet.integrations._patch import Kernel, Patch, Plan

from truncdet._mode import check_mode
from truncdet.fixedpoint import FORMATS

TESTED = ((2, 11), (2, 15))
MODES = ("fixed_point", "off")

_ME = "truncdet.integrations.aten"


def patch(mode: str = "fixed_point", *, allow_untested: bool = False) -> None:
    """Makes the operators of this module's table reproducible until `unpatch`.

    Example:
        >>> from truncdet.integrations import aten
        >>> aten.patch()
        >>> aten.unpatch()
        True

    Args:
        mode: 'fixed_point' (same bits always) or 'off' (the original).
        allow_untested: patch versions of torch outside the tested range too, 2.11 to 2.14; the
            environment variable TRUNCDET_ALLOW_UNTESTED=1 says the same.

    Raises:
        ValueError: for other modes.
        TruncdetError: outside the tested range; nothing is changed then.
    """
    _PATCH.apply(check_mode(mode, f"{_ME}.patch", MODES), allow_untested=allow_untested)


def unpatch() -> bool:
    """Puts the kernels back exactly as they were; returns False if they were not overridden.

    Not while another thread is inside one of the operators: its kernel would vanish under it.
    """
    return _PATCH.undo()


@contextmanager
def patched(mode: str = "fixed_point", *, allow_untested: bool = False) -> Iterator[None]:
    """Patches within a `with` block; blocks nest, and each puts the mode before it back.

    Example:
        >>> import torch
        >>> from truncdet.integrations import aten
        >>> with aten.patched():
        ...     torch.zeros(2).index_add_(0, torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
        tensor([0., 3.])

    Args:
        mode: as for `patch`.
        allow_untested: as for `patch`.

    Raises:
        ValueError: as `patch`.
        TruncdetError: as `patch`.
    """
    with _PATCH.scope(check_mode(mode, f"{_ME}.patched", MODES), allow_untested=allow_untested):
        yield


def is_patched() -> bool:
    """Returns whether a mode other than 'off' is in force."""
    return _PATCH.mode != "off"


def mode() -> str:
    """Returns the mode in force: 'fixed_point' or 'off'."""
    return _PATCH.mode


def covers(op: str, dtype: torch.dtype, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a call of this dispatcher operator repeats: used by the strict checker."""
    operator = BY_NAME.get(op)
    if operator is None or not is_patched() or dtype not in FORMATS:
        return False
    return operator.applies(**arguments)


def _plan(mode: str) -> Plan:
    return Plan(
        kernels=tuple(
            Kernel(name + end, key, form(operator.compute, operator.applies), around=True)
            for name, operator in OPERATORS.items()
            for end, form in operator.forms.items()
            for key in ("CPU", "CUDA")
            # A torch built for the CPU alone has no kernels for CUDA.
            if torch._C._dispatch_has_kernel_for_dispatch_key(name + end, key)
        )
    )


_PATCH = Patch(_ME, "torch", TESTED, _plan)
