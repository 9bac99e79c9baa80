"""What an installer gets: the packages, the wheel, the documented commands."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEFT_BEHIND = shutil.ignore_patterns(
    ".git",
    ".venv*",
    "build",
    "dist",
    "truncdet-demo",
    ".hypothesis",
    "*.egg-info",
    "*.so",
    "__pycache__",
    ".*_cache",
)


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def packages_in(root: Path) -> set[str]:
    """The packages that a tree holds, under the names they install as."""
    found = set()
    for folder, name in (("truncdet", "truncdet"), ("integrations", "truncdet.integrations")):
        for init in (root / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(root / folder).parts
            found.add(".".join([name, *parts]))
    return found


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command at the root of the clone, both outputs as one text."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def copy_tree(target: Path) -> Path:
    """Copies what the clone holds, so that a build leaves nothing in it and finds nothing stale."""
    return Path(shutil.copytree(ROOT, target / "tree", ignore=LEFT_BEHIND))


def build_wheel(tree: Path, **env: str) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    done = run(*pip, "--wheel-dir", str(tree.parent), str(tree), **env)
    assert done.returncode == 0, done.stdout
    (wheel,) = tree.parent.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def reference_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", reason="building a wheel needs setuptools")
    return build_wheel(copy_tree(tmp_path_factory.mktemp("wheel")), TRUNCDET_EXT="none")


def test_listed_packages_are_those_of_the_tree() -> None:
    listed = {name.strip() for name in setup_cfg()["options"]["packages"].split(",")}
    assert listed == packages_in(ROOT)


def test_a_package_that_is_not_listed_is_noticed(tmp_path: Path) -> None:
    for folder in ("truncdet/extra", "integrations/more"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
    assert packages_in(tmp_path) == {"truncdet.extra", "truncdet.integrations.more"}


def test_version_is_written_in_setup_cfg_alone() -> None:
    version = setup_cfg()["metadata"]["version"]
    assert importlib.metadata.version("truncdet") == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    sources = [p for top in ("truncdet", "integrations") for p in (ROOT / top).rglob("*.py")]
    assert not [p for p in sources if f'"{version}"' in p.read_text()]


def test_wheel_holds_every_module_and_data_file(reference_wheel: Path) -> None:
    inside = set(zipfile.ZipFile(reference_wheel).namelist())
    expected = {"truncdet/py.typed"}
    for path in (ROOT / "truncdet").rglob("*"):
        if path.suffix == ".py" or (path.is_file() and "data" in path.parts):
            expected.add(path.relative_to(ROOT).as_posix())
    for path in (ROOT / "integrations").rglob("*.py"):
        expected.add(f"truncdet/{path.relative_to(ROOT).as_posix()}")
    assert expected <= inside
    assert any(name.startswith("truncdet/data/bccd_tiny/images/") for name in inside)
    assert any(name.endswith("licenses/LICENSE") for name in inside)


def test_wheel_without_extension_is_pure_and_holds_nothing_else(reference_wheel: Path) -> None:
    assert reference_wheel.name.endswith("-py3-none-any.whl")
    tops = {name.split("/")[0] for name in zipfile.ZipFile(reference_wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"truncdet"}


@pytest.mark.ci
def test_wheel_without_a_compiler_is_the_reference_under_auto(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    bare = {"PATH": str(tmp_path / "bin"), "CXX": ""}
    wheel = build_wheel(copy_tree(tmp_path), TRUNCDET_EXT="auto", **bare)
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.ci
def test_wheel_without_nvcc_has_the_cpu_extension_for_every_python(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    wheel = build_wheel(copy_tree(tmp_path), TRUNCDET_EXT="auto", CUDA_HOME=absent)
    assert "-cp310-abi3-" in wheel.name
    assert "truncdet/_C.abi3.so" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.ci
def test_a_compile_error_fails_under_auto(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path)
    with (tree / "csrc" / "library.cpp").open("a") as source:
        source.write("#error deliberate\n")
    with pytest.raises(AssertionError, match="#error deliberate"):
        build_wheel(tree, TRUNCDET_EXT="auto", CUDA_HOME=str(tmp_path / "absent"))


def test_lint_tools_have_the_same_version_everywhere() -> None:
    pinned = dict(re.findall(r"(ruff|clang-format)==([\d.]+)", (ROOT / "setup.cfg").read_text()))
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    used = dict(re.findall(r"(ruff|clang-format)(?:-pre-commit)?\n +rev: v([\d.]+)", hooks))
    assert len(pinned) == 2
    assert used == pinned


def readme_commands() -> list[str]:
    """The lines of README's first sh block, comments and blank lines left out."""
    block = re.search(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block, "README.md has no sh block"
    lines = [line.split("#")[0].strip() for line in block[1].splitlines()]
    return [line for line in lines if line]


def test_readme_starts_with_the_two_commands_of_the_makefile() -> None:
    assert readme_commands()[:2] == ["make demo", "make test"]
    for command in readme_commands()[:2]:
        done = run("make", "--dry-run", command.split()[1])
        assert done.returncode == 0, done.stdout


@pytest.mark.ci
def test_the_first_command_of_readme_runs_and_the_second_is_run_by_ci() -> None:
    demo, test = readme_commands()[:2]
    assert f"\n{test}\n" in (ROOT / ".ci" / "run").read_text()
    done = run("bash", "-c", demo)
    assert done.returncode == 0, done.stdout
    assert json.loads((ROOT / "truncdet-demo" / "report.json").read_text())["schema"] == 1
