"""The cache of mmcv's wheel: one build, whole or not at all, and nothing broken is ever used."""

from __future__ import annotations

import configparser
import importlib
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / ".ci" / "frameworks"
STANDARD = "extra_compile_args['cxx'] = ['-std=c++17']"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRUNCDET_WHEELS", str(tmp_path / "wheels"))
    return tmp_path / "wheels"


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with a build that writes a wheel at once and counts, and operators that load."""
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("mmcv_wheel")
    monkeypatch.setattr(module, "builds", [], raising=False)

    def build(scratch: Path, target: Path) -> None:
        module.builds.append(target)
        write_wheel(target)

    monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(module, "load_fault", lambda library: "")
    return module


def write_wheel(folder: Path, name: str = "mmcv/_ext.so") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "mmcv-2.1.0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "operators " * 100)
        archive.writestr("mmcv/version.py", "__version__ = '2.1.0'")
    return path


def test_the_second_call_finds_what_the_first_one_built(cache: Path, wheel: ModuleType) -> None:
    first = wheel.get()
    assert first.is_file()
    assert wheel.get() == first
    assert len(wheel.builds) == 1
    assert first.parent == cache / wheel.key()
    assert {path.name for path in cache.iterdir()} == {wheel.key(), f"{wheel.key()}.lock"}


def test_the_name_tells_torch_and_python(wheel: ModuleType) -> None:
    name = wheel.key()
    assert name.startswith(f"mmcv-2.1.0-torch{torch.__version__}-")
    assert f"-cp{sys.version_info.major}{sys.version_info.minor}-" in name


def test_another_recipe_or_torch_has_another_name(
    wheel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = wheel.key()
    with monkeypatch.context() as changed:
        changed.setattr(wheel, "RECIPE", wheel.RECIPE[:-1])
        assert wheel.key() != name
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert "-torch2.11.0+cu130-" in wheel.key()


def test_the_folder_is_the_users_cache_unless_named(
    wheel: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRUNCDET_WHEELS", "~/here")
    assert wheel.cache_folder() == tmp_path / "here"
    monkeypatch.setenv("TRUNCDET_WHEELS", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert wheel.cache_folder() == tmp_path / "xdg" / "truncdet" / "wheels"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert wheel.cache_folder() == tmp_path / ".cache" / "truncdet" / "wheels"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "no operators", "gone", "two"])
def test_a_broken_wheel_is_built_again(
    cache: Path, wheel: ModuleType, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = wheel.get()
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        at = whole.index(b"'2.1.0'")
        path.write_bytes(whole[:at] + b"X" + whole[at + 1 :])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "no operators":
        write_wheel(path.parent, "mmcv/ops/roi_align.py")
    elif damage == "gone":
        path.unlink()
    else:
        (path.parent / "mmcv-2.1.0-other.whl").write_bytes(whole)
    assert wheel.get() == path
    assert len(wheel.builds) == 2
    assert wheel.inspect(path.parent) == (path, "")
    assert "the cached wheel is built again: " in capsys.readouterr().out


def test_a_wheel_that_does_not_load_is_built_again(
    cache: Path, wheel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel.get()
    answers = iter(["it does not load: undefined symbol", ""])
    monkeypatch.setattr(wheel, "load_fault", lambda library: next(answers))
    wheel.get()
    assert len(wheel.builds) == 2


def test_what_was_built_and_does_not_load_is_not_kept(
    cache: Path, wheel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "load_fault", lambda library: "it does not load: no such symbol")
    with pytest.raises(SystemExit, match="mmcv: the wheel just built is not usable: it does not"):
        wheel.get()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_the_loader_knows_a_library_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("mmcv_wheel")
    library = tmp_path / "_ext.so"
    library.write_text("no library")
    assert module.load_fault(str(library)).startswith("it does not load: ")


def test_a_build_that_fails_leaves_nothing(
    cache: Path, wheel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(scratch: Path, target: Path) -> None:
        write_wheel(target)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(wheel, "build", fail)
        wheel.get()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    wheel.get()
    assert len(wheel.builds) == 1


def test_what_a_killed_build_left_is_cleared_away(cache: Path, wheel: ModuleType) -> None:
    left = cache / f".{wheel.key()}.killed"
    other = cache / ".mmcv-2.1.0-torch1.0.0.at-work"
    for folder in (left, other):
        folder.mkdir(parents=True)
    wheel.get()
    assert not left.exists()
    assert other.exists()


ASK = """
import os, sys, time, zipfile
from pathlib import Path
sys.path.insert(0, {folder!r})
import mmcv_wheel

here = Path({here!r})

def build(scratch, target):
    print("built", flush=True)
    while len(list(here.glob("*.ready"))) < 2:  # the other process is about to ask
        time.sleep(0.01)
    time.sleep(0.2)
    target.mkdir()
    with zipfile.ZipFile(target / "mmcv-2.1.0-any.whl", "w") as archive:
        archive.writestr("mmcv/_ext.so", "")

mmcv_wheel.build, mmcv_wheel.load_fault = build, lambda library: ""
mmcv_wheel.key = lambda: "mmcv-2.1.0-any"
(here / f"{{os.getpid()}}.ready").touch()
print(mmcv_wheel.get().is_file())
"""


def test_of_two_processes_at_once_one_builds_and_the_other_waits(
    cache: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", ASK.format(folder=str(FOLDER), here=str(tmp_path))]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = sorted(process.communicate()[0].split() for process in processes)
    assert outputs == [["True"], ["built", "True"]]


def source_tree(folder: Path, setup: str) -> Path:
    operators = folder / "mmcv" / "ops" / "csrc" / "pytorch"
    (operators / "cpu").mkdir(parents=True)
    for name in ("nms", "pybind", "roi_align"):
        (operators / f"{name}.cpp").write_text(f"// {name}\n")
    for name in ("a", "b", "c", "d", "bezier_align", "psamask"):
        (operators / "cpu" / f"{name}.cpp").write_text(f"// {name}\n")
    (folder / "setup.py").write_text(setup)
    return operators


def test_sources_are_grouped_and_torch_picks_the_standard(
    tmp_path: Path, wheel: ModuleType
) -> None:
    operators = source_tree(tmp_path, f"if True:\n    {STANDARD}\n")
    wheel.mmcv_source.prepare(tmp_path)
    assert (tmp_path / "setup.py").read_text() == "if True:\n    extra_compile_args['cxx'] = []\n"
    for folder, count, alone in ((operators, 2, 0), (operators / "cpu", 3, 2)):
        compiled = {path.name for path in folder.glob("*.cpp")}
        groups = {name for name in compiled if name.startswith("group_")}
        assert (len(groups), len(compiled - groups)) == (count, alone)
        included = [line.split('"')[1] for name in groups for line in (folder / name).open()]
        assert sorted(included) == sorted(path.name for path in folder.glob("*.inc"))


@pytest.mark.parametrize(("setup", "count"), [("", 0), (f"{STANDARD}\n{STANDARD}\n", 2)])
def test_an_unknown_setup_is_refused(
    tmp_path: Path, wheel: ModuleType, setup: str, count: int
) -> None:
    source_tree(tmp_path, setup)
    with pytest.raises(SystemExit) as caught:
        wheel.mmcv_source.prepare(tmp_path)
    assert str(caught.value) == f"mmcv: setup.py must hold {STANDARD} once, got it {count} times"


def test_unknown_sources_are_refused(tmp_path: Path, wheel: ModuleType) -> None:
    operators = source_tree(tmp_path, STANDARD)
    (operators / "cpu" / "psamask.cpp").unlink()
    with pytest.raises(SystemExit, match=r"cpu must hold psamask.cpp, bezier_align.cpp, got 5"):
        wheel.mmcv_source.prepare(tmp_path)


def test_the_build_is_for_the_cpu_on_every_machine(
    wheel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_CUDA", "1")
    monkeypatch.setenv("FORCE_NPU", "1")
    monkeypatch.setenv("MAX_JOBS", "7")
    environment = wheel.build_environment()
    assert (environment["FORCE_CUDA"], environment["CUDA_VISIBLE_DEVICES"]) == ("0", "")
    assert (environment["MMCV_WITH_OPS"], environment["MAX_JOBS"]) == ("1", "7")
    assert "FORCE_NPU" not in environment


def test_everything_is_pinned_and_comes_from_no_named_host() -> None:
    for file in FOLDER.glob("*.txt"):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert all("==" in line for line in lines)
        assert all("--hash=sha256:" in line for line in lines) == (file.name != "requirements.txt")
    assert not [file for file in FOLDER.iterdir() if file.is_file() and "://" in file.read_text()]


def test_what_the_tests_install_is_what_the_extras_ask_for() -> None:
    requirements = pytest.importorskip("packaging.requirements")
    config = configparser.ConfigParser()
    config.read(FOLDER.parents[1] / "setup.cfg")
    pinned = {}
    for line in (FOLDER / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split(";")[0].strip().split("==")
            pinned[name.lower()] = version
    for extra in ("mmdet", "detectron2"):
        lines = config["options.extras_require"][extra].split("\n")
        wanted = [requirements.Requirement(line) for line in lines if line]
        assert len(wanted) >= 3
        assert not [one for one in wanted if not one.specifier.contains(pinned[one.name])]
