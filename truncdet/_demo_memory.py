"""Peak memory of one run: the allocator's on CUDA, the whole process' on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def describe_peak(device: torch.device) -> str:
    """What `peak_bytes` is on this device, for the report and the screen."""
    if device.type == "cuda":
        return "most bytes allocated on the GPU by tensors (torch.cuda.max_memory_allocated)"
    if _STATUS.exists():
        return "peak resident memory of the whole process during the run (VmHWM)"
    return "peak resident memory of the whole process since its start (ru_maxrss)"


def reset_peak(device: torch.device) -> None:
    """Starts a new measurement."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        # 5 is Linux' request to set the peak back to the present size.
        _CLEAR.write_text("5")
    except OSError:
        pass


def peak_bytes(device: torch.device) -> int | None:
    """The peak since `reset_peak`; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes on Linux, bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024
