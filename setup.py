"""Builds truncdet/_C.abi3.so, one extension on torch's stable ABI; TRUNCDET_EXT picks its content.

auto: what the tools at hand allow (a missing tool takes it down a step, a compile error fails);
none: nothing, the pure-PyTorch reference gives the same bits; cpu: the C++ kernels; cuda: both.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).resolve().parent
CHOICES = ("auto", "none", "cpu", "cuda")
BUILD_COMMANDS = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}

# The oldest torch whose stable ABI has all that csrc uses; the .so runs on it and on any later one.
TARGET = (2, 10)
ARCHS = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")

# The bits are defined by single IEEE operations: nothing may fuse, reorder or flush them. These
# come after the user's CFLAGS, so that a -ffast-math there is taken back.
CXX_FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-fno-fast-math", "-fvisibility=hidden"]
NVCC_FLAGS = [
    "-O3",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "-Xcompiler=-ffp-contract=off,-fno-fast-math,-fvisibility=hidden",
]


def requested() -> str:
    """Returns the value of TRUNCDET_EXT, or stops and names a bad one."""
    value = os.environ.get("TRUNCDET_EXT", "auto").strip().lower() or "auto"
    if value not in CHOICES:
        raise SystemExit(
            f"truncdet: TRUNCDET_EXT must be one of {', '.join(CHOICES)}, got {value!r}"
        )
    return value


def decide(switch: str, no_cpu: str | None, no_cuda: str | None) -> tuple[str, str]:
    """Returns what is built and why, given what stands in the way of each (None: nothing)."""
    if switch == "auto":
        if no_cpu:
            return "none", f"{no_cpu}, so the slower pure-PyTorch reference gives the same bits"
        return (
            ("cpu", no_cuda) if no_cuda else ("cuda", "a C++ compiler, nvcc and torch's CUDA match")
        )
    missing = {"none": None, "cpu": no_cpu, "cuda": no_cpu or no_cuda}[switch]
    if missing:
        raise SystemExit(f"truncdet: TRUNCDET_EXT={switch} cannot be built: {missing}")
    return switch, f"TRUNCDET_EXT={switch} asks for it"


def find_cxx() -> str | None:
    """Returns the C++ compiler command, CXX first."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((name for name in names if shutil.which(name.split()[0])), None)


def find_nvcc() -> Path | None:
    """Returns nvcc inside its toolkit; one on PATH may be a wrapper, so it tells its root."""
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        nvcc = Path(home, "bin", "nvcc")
        return nvcc if nvcc.exists() else None
    if on_path := shutil.which("nvcc"):
        dry = [on_path, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
        text = subprocess.run(dry, capture_output=True, text=True, check=False).stderr
        top = re.search(r"^#\$ TOP=(.+)$", text, re.MULTILINE)
        home = str(Path(top[1]).resolve()) if top else str(Path(on_path).resolve().parents[1])
    nvcc = Path(home or "/usr/local/cuda", "bin", "nvcc")
    return nvcc if nvcc.exists() else None


def find_cudart(nvcc: Path) -> Path | None:
    """Returns the folder of the static CUDA runtime that belongs to `nvcc`."""
    folders = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    candidates = (nvcc.parents[1] / folder for folder in folders)
    return next((folder for folder in candidates if (folder / "libcudart_static.a").exists()), None)


def ask(nvcc: Path, option: str) -> str:
    """Returns what nvcc prints for a query option."""
    return subprocess.run([nvcc, option], capture_output=True, text=True, check=True).stdout


def obstacles(torch: Any) -> tuple[str | None, str | None]:
    """Returns what keeps the C++ and the CUDA kernels from being built, as clauses, or None."""
    if tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) < TARGET:
        return f"torch {torch.__version__} is older than {TARGET[0]}.{TARGET[1]}", None
    if find_cxx() is None:
        return "no C++ compiler was found (c++, g++, clang++ or CXX)", None
    if torch.version.cuda is None:
        return None, "this torch is built without CUDA"
    nvcc = find_nvcc()
    if nvcc is None:
        return None, "no nvcc was found (CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda)"
    release = re.search(r"release (\d+)", ask(nvcc, "--version"))
    if release is None or release[1] != torch.version.cuda.split(".")[0]:
        theirs = release[1] if release else "unknown"
        return None, f"nvcc is of CUDA {theirs} and torch of CUDA {torch.version.cuda}"
    if find_cudart(nvcc) is None:
        return None, f"libcudart_static.a is not in the toolkit of {nvcc}"
    return None, None


def cuda_options(nvcc: Path) -> dict[str, Any]:
    """Returns the Extension arguments that the CUDA kernels add, and picks the architectures."""
    known = ask(nvcc, "--list-gpu-arch").split()
    usual = [arch for arch in ARCHS if f"compute_{arch.replace('.', '')}" in known]
    archs = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ";".join(usual) + "+PTX")
    os.environ["CUDA_HOME"] = str(nvcc.parents[1])
    # The runtime is linked statically and kept private: the .so then loads whatever CUDA minor
    # version torch brings, and on machines without a GPU; both runtimes share the driver's context.
    return {
        "define_macros": [
            ("USE_CUDA", "1"),  # torch's shim headers show their CUDA part under this name
            ("TRUNCDET_WITH_CUDA", "1"),
            ("TRUNCDET_CUDA_ARCHS", f'"{archs}"'),
        ],
        "include_dirs": [str(nvcc.parents[1] / "include")],
        "extra_link_args": [
            f"-L{find_cudart(nvcc)}",
            "-lcudart_static",
            "-Wl,--exclude-libs,libcudart_static.a",
            *("-ldl", "-lrt", "-lpthread"),
        ],
    }


def extension(kind: str) -> dict[str, Any]:
    """Returns the arguments of setup() that build the extension `kind`."""
    os.environ["CXX"] = find_cxx() or "c++"
    options = cuda_options(nvcc) if kind == "cuda" and (nvcc := find_nvcc()) else {}
    # Imported late: it reads CUDA_HOME once, when imported.
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    folders = {"cpu": ("*.cpp", "cpu/*.cpp"), "cuda": ("*.cpp", "cpu/*.cpp", "cuda/*.cu")}[kind]
    sources = sorted(path for glob in folders for path in (ROOT / "csrc").glob(glob))
    headers = [path for glob in ("**/*.h", "**/*.cuh") for path in (ROOT / "csrc").glob(glob)]
    target = f"0x{TARGET[0]:02x}{TARGET[1]:02x}000000000000"
    # libtorch.so pulls in libtorch_cuda.so where torch has it, so that is never named here; linkers
    # that drop libraries no symbol asks for must keep it.
    keep = ["-Wl,--no-as-needed", "-ltorch"] if sys.platform == "linux" else []
    module = CppExtension(
        "truncdet._C",
        [str(path.relative_to(ROOT)) for path in sources],
        depends=[str(path.relative_to(ROOT)) for path in headers],
        define_macros=[("TORCH_TARGET_VERSION", target), *options.get("define_macros", [])],
        include_dirs=[str(ROOT / "csrc"), *options.get("include_dirs", [])],
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
        extra_link_args=keep + options.get("extra_link_args", []),
        py_limited_api=True,
    )
    # force: a change of flags or switch must not be mistaken for an up-to-date build.
    settings = {"bdist_wheel": {"py_limited_api": "cp310"}, "build_ext": {"force": True}}
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": BuildExtension},
        "options": settings,
    }


def main() -> None:
    switch = requested()
    if not BUILD_COMMANDS.intersection(sys.argv):
        return setup()  # metadata and sdist need neither torch nor a compiler
    if switch == "none":
        kind, why = decide(switch, None, None)
    else:
        try:
            import torch
        except ImportError as error:
            raise SystemExit(
                f"truncdet: building the extension needs torch, which cannot be imported ({error});"
                " install torch first, drop --no-build-isolation, or set TRUNCDET_EXT=none"
            ) from None
        kind, why = decide(switch, *obstacles(torch))
    print(f"truncdet: building the extension '{kind}': {why}", file=sys.stderr)
    if kind == "none" and "editable_wheel" in sys.argv:
        # An editable install loads from the tree, where an earlier build may still lie.
        (ROOT / "truncdet" / "_C.abi3.so").unlink(missing_ok=True)
    setup(**extension(kind) if kind != "none" else {})


if __name__ == "__main__":
    main()
