"""TRUNCDET_EXT: what setup.py builds for which tools at hand, and what runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import truncdet

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    pytest.importorskip("setuptools", reason="setup.py needs setuptools")
    spec = importlib.util.spec_from_file_location("truncdet_setup", ROOT / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def show_extension(switch: str) -> subprocess.CompletedProcess[str]:
    """Imports truncdet in a new process under a value of the switch."""
    show = "import truncdet; print(truncdet.build_info()['extension'])"
    env = {**os.environ, "TRUNCDET_EXT": switch}
    return subprocess.run(
        [sys.executable, "-c", show], env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("value", ["gpu", "0"])
def test_a_bad_switch_is_named_when_building(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TRUNCDET_EXT", value)
    with pytest.raises(SystemExit) as caught:
        setup_py.requested()
    assert str(caught.value) == (
        f"truncdet: TRUNCDET_EXT must be one of auto, none, cpu, cuda, got {value!r}"
    )


@pytest.mark.parametrize(
    ("switch", "no_cpu", "no_cuda", "kind", "why"),
    [
        ("auto", None, None, "cuda", "match"),
        ("auto", None, "no nvcc", "cpu", "no nvcc"),
        ("auto", "no compiler", None, "none", "no compiler"),
        ("auto", "no compiler", "no nvcc", "none", "no compiler"),
        ("none", "no compiler", "no nvcc", "none", "asks"),
        ("cpu", None, "no nvcc", "cpu", "asks"),
        ("cuda", None, None, "cuda", "asks"),
    ],
)
def test_a_missing_tool_takes_auto_down_a_step(
    setup_py: ModuleType,
    switch: str,
    no_cpu: str | None,
    no_cuda: str | None,
    kind: str,
    why: str,
) -> None:
    decided, reason = setup_py.decide(switch, no_cpu, no_cuda)
    assert decided == kind
    assert why in reason


@pytest.mark.parametrize(
    ("switch", "no_cpu", "no_cuda", "missing"),
    [("cpu", "no C++", None, "no C++"), ("cuda", None, "no nvcc", "no nvcc")],
)
def test_what_is_asked_for_is_never_degraded(
    setup_py: ModuleType, switch: str, no_cpu: str | None, no_cuda: str | None, missing: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        setup_py.decide(switch, no_cpu, no_cuda)
    assert str(caught.value) == f"truncdet: TRUNCDET_EXT={switch} cannot be built: {missing}"


def fake_torch(version: str, cuda: str | None) -> SimpleNamespace:
    return SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda))


def test_each_obstacle_is_found(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler, nvcc = tmp_path / "c++", tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    find = setup_py.obstacles
    assert find(fake_torch("2.9.1+cpu", None)) == ("torch 2.9.1+cpu is older than 2.10", None)
    assert find(fake_torch("2.10.0", None))[0].startswith("no C++ compiler was found")
    compiler.touch(mode=0o755)
    assert find(fake_torch("2.10.0", None)) == (None, "this torch is built without CUDA")
    assert find(fake_torch("2.10.0", "13.0"))[1].startswith("no nvcc was found")
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.8, V12.8.1\n")
    nvcc.chmod(0o755)
    assert find(fake_torch("2.10.0", "13.0")) == (
        None,
        "nvcc is of CUDA 12 and torch of CUDA 13.0",
    )
    assert find(fake_torch("2.10.0", "12.6"))[1].startswith("libcudart_static.a is not in")
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libcudart_static.a").touch()
    assert find(fake_torch("2.10.0", "12.6")) == (None, None)


def test_loaded_extension_is_the_expected_one() -> None:
    expected = os.environ.get("TRUNCDET_EXPECT_EXT")
    if expected in (None, "auto"):
        pytest.skip("TRUNCDET_EXPECT_EXT does not say which extension to expect")
    assert truncdet.build_info()["extension"] == expected


def test_the_switch_turns_the_extension_off_when_running() -> None:
    assert show_extension("none").stdout.split() == ["none"]


def test_a_bad_switch_is_named_when_running() -> None:
    done = show_extension("gpu")
    assert done.returncode != 0
    assert "TRUNCDET_EXT must be one of auto, none, cpu, cuda, got 'gpu'" in done.stderr
