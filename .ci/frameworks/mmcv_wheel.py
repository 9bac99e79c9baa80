"""mmcv with its CPU operators as a wheel: built once, then taken from a cache.

Registries have mmcv as source alone. pip would build it without operators (in isolation there is
no torch), and would cache the wheel for any torch; so here it is built by hand and kept under a
name that has the versions of torch and Python. TRUNCDET_WHEELS names the cache's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import mmcv_source

HERE = Path(__file__).resolve().parent
PIN = HERE / "mmcv.txt"
# What a wheel depends on besides torch and Python: a changed recipe must not find an old wheel.
RECIPE = (PIN, HERE / "mmcv_source.py", HERE / "mmcv_wheel.py")

_LOAD = """
import sys, torch
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
loader = ExtensionFileLoader("_ext", sys.argv[1])
loader.exec_module(module_from_spec(spec_from_file_location("_ext", sys.argv[1], loader=loader)))
"""


def get() -> Path:
    """Returns the wheel for this Python and its torch, built if the cache has no sound one.

    Of processes that ask at once one builds and the others wait. A build is seen whole or not at
    all: it happens beside its place and is moved there by one rename.
    """
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    place = cache / key()
    with _lock(cache / f"{place.name}.lock"):
        if place.exists():
            wheel, fault = inspect(place)
            if not fault:
                return wheel
            print(f"mmcv: the cached wheel is built again: {fault}", flush=True)
        for leftover in cache.glob(f".{place.name}.*"):  # of builds that were killed
            shutil.rmtree(leftover)
        scratch = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=cache))
        try:
            built = scratch / "wheel"
            build(scratch, built)
            wheel, fault = inspect(built)
            if fault:
                raise SystemExit(f"mmcv: the wheel just built is not usable: {fault}")
            if place.exists():
                place.rename(scratch / "broken")
            built.rename(place)
        finally:
            shutil.rmtree(scratch)
    return place / wheel.name


def cache_folder() -> Path:
    """Returns TRUNCDET_WHEELS, or truncdet/wheels in the user's cache directory."""
    named = os.environ.get("TRUNCDET_WHEELS")
    if named:
        return Path(named).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (base if base.is_absolute() else Path.home() / ".cache") / "truncdet" / "wheels"


def key() -> str:
    """Returns the folder's name: mmcv, torch, Python, platform, and a digest of the recipe."""
    import torch

    recipe = hashlib.sha256(b"".join(file.read_bytes() for file in RECIPE)).hexdigest()[:8]
    name, version = PIN.read_text().split()[0].split("==")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_")
    return f"{name}-{version}-torch{torch.__version__}-{python}-{platform}-{recipe}"


def inspect(folder: Path) -> tuple[Path, str]:
    """Returns the wheel in a folder and what is wrong with it, or an empty string."""
    wheels = list(folder.glob("mmcv-*.whl"))
    if len(wheels) != 1:
        return folder, f"{len(wheels)} wheels"
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            if damaged := archive.testzip():
                return wheels[0], f"{damaged} is damaged"
            operators = [n for n in archive.namelist() if n.startswith("mmcv/_ext.")]
            if not operators:
                return wheels[0], "it has no compiled operators"
            with tempfile.TemporaryDirectory() as scratch:
                return wheels[0], load_fault(archive.extract(operators[0], scratch))
    except zipfile.BadZipFile as error:
        return wheels[0], str(error)


def load_fault(library: str) -> str:
    """Returns why this torch cannot load mmcv's operators, or an empty string."""
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, library], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else f"it does not load: {done.stderr.strip()[-500:]}"


def build(scratch: Path, target: Path) -> None:
    """Builds the wheel from the pinned source archive into `target`, working in `scratch`."""
    print("mmcv: building it with CPU operators, which takes a few minutes", flush=True)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    # Not isolated: torch must be seen, by the metadata that pip asks for on download as well.
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir"]
    archive = ["--no-binary=:all:", "--require-hashes", "--requirement", str(PIN)]
    environment = build_environment()
    subprocess.run(
        [*pip, "download", *options, *archive, "--dest", str(scratch / "archive")],
        env=environment,
        check=True,
    )
    (packed,) = (scratch / "archive").iterdir()
    shutil.unpack_archive(packed, scratch / "source")
    (source,) = (scratch / "source").iterdir()
    mmcv_source.prepare(source)
    subprocess.run(
        [*pip, "wheel", *options, "--wheel-dir", str(target), str(source)],
        env=environment,
        check=True,
    )


def build_environment() -> dict[str, str]:
    """Returns the environment of the build: CPU operators whatever the machine has."""
    other = ("FORCE_MLU", "FORCE_NPU", "FORCE_MPS", "MMCV_WITH_DIOPI")
    environment = {name: value for name, value in os.environ.items() if name not in other}
    environment.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    # mmcv takes a visible GPU for the wish to compile CUDA, whatever FORCE_CUDA says.
    environment.update(
        MMCV_WITH_OPS="1", FORCE_CUDA="0", CUDA_VISIBLE_DEVICES="", CFLAGS="-O2 -g0 -w"
    )
    return environment


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds a lock that the system takes away from a process that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
