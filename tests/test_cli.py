"""The `truncdet` command besides the demo."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest
import torchvision
from click.testing import CliRunner

import truncdet
from truncdet._cli import main
from truncdet._operators import ROWS
from truncdet._status import operators_text

# Prints the modules that --help brings in on top of the package itself.
HELP = """
import sys
import truncdet
before = set(sys.modules)
from truncdet._cli import main
for arguments in (["--help"], ["demo", "--help"]):
    main(arguments, standalone_mode=False)
print("NEW", *sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def output(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    *text, last = done.stdout.splitlines()
    assert "demo" in "".join(text) and last.startswith("NEW ")
    new = set(last.split()[1:])
    assert "click" in new
    assert not new & {"torch", "torchvision", "numpy", "matplotlib", "pycocotools", "PIL", "rich"}


def test_version_is_that_of_the_package() -> None:
    assert importlib.metadata.version("truncdet") in output("--version")


def test_status_prints_the_table() -> None:
    assert output("status").rstrip("\n") == f"{truncdet.status()}\n\n{operators_text()}"
    lines = operators_text().splitlines()
    assert lines[0].split() == [
        *("operator", "replaces", "forward", "backward", "devices", "dtypes", "error", "memory")
    ]
    assert len(lines) == len(ROWS) + 2
    assert lines[2].split()[:2] == ["truncdet.roi_align", "torchvision.ops.roi_align;"]


def test_status_can_show_what_enable_covers_and_leaves_nothing_patched() -> None:
    with truncdet.deterministic():
        expected = str(truncdet.status())
    before = str(truncdet.status())
    found = output("status", "--enable").rstrip("\n")
    assert found == f"{expected}\n\n{operators_text()}" and expected != before
    assert str(truncdet.status()) == before


def test_status_names_a_version_that_it_cannot_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUNCDET_ALLOW_UNTESTED", raising=False)
    monkeypatch.setattr(torchvision, "__version__", "0.99.0")
    result = CliRunner().invoke(main, ["status", "--enable"])
    assert result.exit_code == 2
    assert "Error: truncdet status: truncdet.integrations.torchvision" in result.output
    assert "Traceback" not in result.output


def test_build_info_is_json() -> None:
    info = json.loads(output("build-info"))
    assert info["extension"] == truncdet.build_info()["extension"]


def test_module_and_command_are_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "truncdet", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("Usage: truncdet ")
    for name in ("demo", "status", "build-info"):
        assert name in done.stdout
