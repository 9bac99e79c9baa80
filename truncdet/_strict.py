"""The strict checker: sees every operator, forward and backward, and names the ones that differ.

Autograd's threads inherit the dispatch mode of the thread that calls `backward`, so an operator
that runs only there is seen too. Kernels that bypass the dispatcher (mmcv, nvdiffrast) are not.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from truncdet._errors import TruncdetError
from truncdet._frameworks import integration
from truncdet._strict_table import TABLE


class StrictMode(TorchDispatchMode):
    """Raises (level True) or warns once per operator (level 'warn') when one is not repeatable.

    Args:
        level: True or 'warn'.
        devices: device types on which atomics make the order of sums vary.
    """

    def __init__(self, level: bool | str, devices: Collection[str] = ("cuda",)) -> None:
        super().__init__()
        self.level, self.devices = check_level(level, "StrictMode"), frozenset(devices)
        self.warned: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # An in-place form is the same kernel: index_add_ is index_add.
        op = func._schema.name.rstrip("_")
        entry = TABLE.get(op)
        if entry is not None:
            names = [argument.name for argument in func._schema.arguments]
            bound = {**dict(zip(names, args, strict=False)), **kwargs}
            dtype = self._dtype(bound.values())
            if (
                dtype is not None
                and entry.when(bound)
                and not _covered(op, dtype, bound, entry.flag)
            ):
                self._report(op, f"{op}: {entry.why}; {entry.fix}")
        return func(*args, **kwargs)

    def _report(self, op: str, text: str) -> None:
        if self.level is True:
            raise TruncdetError(f"strict: {text}")
        if op not in self.warned:
            self.warned.add(op)
            warnings.warn(f"truncdet strict: {text}", RuntimeWarning, stacklevel=4)

    def _dtype(self, values: Any) -> torch.dtype | None:
        """The dtype of the first float tensor on one of our devices: integers add exactly."""
        for value in values:  # no operator of the table takes a list of tensors
            if isinstance(value, torch.Tensor) and value.device.type in self.devices:
                if value.is_floating_point() or value.is_complex():
                    return value.dtype
        return None


def check_level(level: object, where: str) -> bool | str:
    """Returns the strict level if it is False, 'warn' or True."""
    if isinstance(level, bool):
        return level
    if level == "warn":
        return "warn"
    raise ValueError(f"{where}: strict must be False, 'warn' or True, got {level!r}")


def check_innermost(mode: StrictMode) -> None:
    """Raises TruncdetError if ending `mode` now would end somebody else's dispatch mode."""
    if _get_current_dispatch_mode() is not mode:
        raise TruncdetError(
            "disable: the strict checker must be the innermost dispatch mode of this thread, "
            "got another mode entered since, or another thread"
        )


def leave(mode: StrictMode) -> None:
    """Ends a mode that was entered with `__enter__`."""
    check_innermost(mode)
    mode.__exit__(None, None, None)


def _covered(op: str, dtype: torch.dtype, arguments: Mapping[str, Any], flag: bool) -> bool:
    if flag and torch.are_deterministic_algorithms_enabled():
        return True
    # torch's own operators are covered for some of their arguments, torchvision's for all.
    ours, theirs = map(integration, ("torch", "torchvision"))
    return (ours is not None and ours.covers(op, dtype, arguments)) or (
        theirs is not None and theirs.covers(op, dtype)
    )
