"""The operator library: every `torch.ops.truncdet.*` schema is defined on it, beside its reference.

The compiled extension only adds kernels to these schemas; it is loaded before they are defined, and
the dispatcher falls back to the references for whatever it lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from truncdet import _build as _build  # loads the extension
from truncdet._refusals import refusing


class _Library(torch.library.Library):
    """Its operators refuse what they have no formula for: tangents and torch.func's transforms."""

    def impl(
        self, op_name: Any, fn: Callable[..., Any], dispatch_key: str = "", **options: Any
    ) -> Any:
        if dispatch_key == "Autograd" and fn is not torch.library.fallthrough_kernel:
            fn = refusing(str(op_name), fn)
        return super().impl(op_name, fn, dispatch_key, **options)


LIB = _Library("truncdet", "FRAGMENT")
