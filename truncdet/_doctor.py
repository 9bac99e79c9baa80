"""`doctor`: what decides here whether a training repeats, as a table and as JSON."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from truncdet._build import build_info
from truncdet._flags import CUBLAS, CUBLAS_FIXED
from truncdet._status import Status, status
from truncdet._version import __version__

SCHEMA = 1
_torch: Any = torch
# Unless somebody seeds it, torch draws the seed of its CPU generator, from many more numbers.
_PROBABLY_CHOSEN = 1 << 32
_PACKAGES = (
    "torch", "torchvision", "numpy", "mmcv", "mmengine", "mmdet", "detectron2", "sal-detectron2",
    "diffrp-nvdiffrast", "nvdiffrast", "torch-scatter", "pycocotools", "triton",
)  # fmt: skip
_VARIABLES = (
    CUBLAS, "PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS",
    "TORCH_NCCL_HIGH_PRIORITY", "TRUNCDET_ALLOW_UNTESTED",
)  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """One thing that may keep a training from repeating, and what to do."""

    about: str
    found: str
    advice: str


@dataclass(frozen=True)
class Report:
    """What `doctor` found.

    Attributes:
        machine: system, Python, devices, driver.
        versions: of packages that are installed.
        variables: environment variables that matter, None where not set.
        flags: of torch.
        seeds: what is known of the generators.
        status: operators, and whether they are covered.
        advice: what to change, most important first; empty where nothing is known.
    """

    machine: dict[str, Any]
    versions: dict[str, str]
    variables: dict[str, str | None]
    flags: dict[str, Any]
    seeds: dict[str, str]
    status: Status
    advice: tuple[Advice, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON's types, schema 1."""
        return {
            "schema": SCHEMA,
            "machine": self.machine,
            "versions": self.versions,
            "variables": self.variables,
            "flags": self.flags,
            "seeds": self.seeds,
            "operators": self.status.as_dict(),
            "advice": [vars(item) for item in self.advice],
        }

    def __str__(self) -> str:
        sections: list[tuple[str, dict[str, Any]]] = [
            ("machine", self.machine),
            ("versions", self.versions),
            ("variables", self.variables),
            ("flags", self.flags),
            ("seeds", self.seeds),
        ]
        lines = []
        for title, content in sections:
            lines.append(title)
            width = max((len(name) for name in content), default=0)
            for name, value in content.items():
                lines.append(f"  {name.ljust(width)}  {'not set' if value is None else value}")
        lines += ["operators", *(f"  {line}" for line in str(self.status).splitlines())]
        lines.append("advice")
        lines += [f"  {item.about}: {item.found}. {item.advice}." for item in self.advice]
        if not self.advice:
            lines.append(
                "  none: seeds, flags and variables are as a repeatable training needs them"
            )
        return "\n".join(lines)


def doctor() -> Report:
    """Reports what decides here whether a training repeats; it changes nothing.

    Call it where the training starts, after whatever sets flags and seeds. Packages are found by
    their metadata; none is imported.

    Example:
        >>> import truncdet
        >>> "torch" in truncdet.doctor().versions
        True

    Returns:
        The report: `str` of it is a table, `as_dict()` for JSON.
    """
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    flags = {name: read() for name, read in _FLAGS.items()}
    seeds = _seeds()
    return Report(
        _machine(),
        {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        variables,
        flags,
        seeds,
        status(),
        tuple(_advice(variables, flags, seeds)),
    )


_FLAGS: dict[str, Callable[[], Any]] = {
    "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "matmul precision": torch.get_float32_matmul_precision,
    "use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "deterministic warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "fill_uninitialized_memory": lambda: _torch.utils.deterministic.fill_uninitialized_memory,
    "threads": torch.get_num_threads,
    "flush denormals": lambda: _flushes(),
}


def _flushes() -> bool:
    smallest = torch.tensor([2.0**-149])
    return bool((smallest * 1 == 0).item())


def _seeds() -> dict[str, str]:
    seed = torch.initial_seed()
    chosen = "seeded with" if seed < _PROBABLY_CHOSEN else "probably not seeded:"
    found = {"torch": f"{chosen} {seed}"}
    if torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            generator = torch.cuda.default_generators[number]
            found[f"cuda:{number}"] = f"seed {generator.initial_seed()}"
    hash_seed = os.environ.get("PYTHONHASHSEED")
    set_ = hash_seed not in (None, "", "random")
    found["hashes of str"] = "fixed" if set_ else "differ from process to process"
    # Python's and NumPy's generators do not tell whether somebody seeded them.
    found["random, numpy"] = "cannot be told"
    return found


def _machine() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "truncdet": f"{__version__}, extension {build_info()['extension']}",
        "cuda of torch": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _driver(),
        "devices": ", ".join(gpus) or "no GPU",
        "cpu": platform.processor() or platform.machine(),
    }


def _driver() -> str | None:
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip() or None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get(name), "__version__", None)


def _advice(
    variables: dict[str, str | None], flags: dict[str, Any], seeds: dict[str, str]
) -> list[Advice]:
    found = []
    if not flags["cudnn.deterministic"]:
        found.append(
            Advice(
                "cudnn.deterministic",
                "off: convolutions may add in no fixed order",
                "truncdet.enable(), or torch.backends.cudnn.deterministic = True",
            )
        )
    if flags["cudnn.benchmark"]:
        found.append(
            Advice(
                "cudnn.benchmark",
                "on: which algorithm runs depends on timings",
                "truncdet.enable(), or torch.backends.cudnn.benchmark = False",
            )
        )
    if variables[CUBLAS] not in CUBLAS_FIXED:
        found.append(
            Advice(
                CUBLAS,
                f"{variables[CUBLAS] or 'not set'}: matrix products on several streams may differ",
                f"set it to {' or '.join(CUBLAS_FIXED)} before the program starts",
            )
        )
    if not seeds["torch"].startswith("seeded"):
        found.append(Advice("seeds", f"torch is {seeds['torch']}", "truncdet.enable(seed=0)"))
    if seeds["hashes of str"] != "fixed":
        found.append(
            Advice(
                "PYTHONHASHSEED",
                "not fixed: sets of str have another order in every process",
                "start the program with PYTHONHASHSEED=0 if it goes through sets",
            )
        )
    if flags["use_deterministic_algorithms"] and flags["fill_uninitialized_memory"]:
        found.append(
            Advice(
                "fill_uninitialized_memory",
                "on: every new tensor is filled, which costs time and makes no sum repeatable",
                "torch.utils.deterministic.fill_uninitialized_memory = False",
            )
        )
    return found
