"""The operator library: every `torch.ops.truncdet.*` schema is defined on it, beside its reference.

The compiled extension only adds kernels to these schemas; it is loaded before they are defined, and
the dispatcher falls back to the references for whatever it lacks.
"""

from __future__ import annotations

import torch

from truncdet import _build as _build  # loads the extension

LIB = torch.library.Library("truncdet", "FRAGMENT")
