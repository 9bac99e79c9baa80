"""The `truncdet` command. Beyond torch itself, each subcommand imports what it needs."""

from __future__ import annotations

import json
import signal
import traceback
from pathlib import Path
from typing import Any

import click

from truncdet import _cli_audit, _cli_doctor
from truncdet._demo_options import DEMO_MODES, DemoError, DemoOptions
from truncdet._version import __version__

_FOLDER = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="truncdet")
def main() -> None:
    """Training that repeats bit for bit: reproducible detection operators."""


@main.command()
@click.option(
    "--steps", type=click.IntRange(min=1), default=DemoOptions.steps, help="Training steps per run."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default=DemoOptions.device,
    help="auto is cuda where there is a GPU.",
)
@click.option(
    "--mode",
    "modes",
    type=click.Choice(DEMO_MODES),
    multiple=True,
    default=DemoOptions.modes,
    help="A mode to run twice; may be given several times.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=DemoOptions.seed, help="Of every run."
)
@click.option("--out", type=_FOLDER, default=DemoOptions.out, help="Folder for report and picture.")
@click.option(
    "--data", type=_FOLDER, help="Folder of images, with --ann.  [default: the bundled set]"
)
@click.option("--ann", type=_FOLDER, help="Annotation file in COCO's format.")
@click.option("--eval-ann", type=_FOLDER, help="File to measure AP on.  [default: that of --ann]")
@click.option(
    "--batch", type=click.IntRange(1, 64), default=DemoOptions.batch, help="Images per step."
)
@click.option(
    "--image-size",
    type=click.IntRange(64, 1024),
    default=DemoOptions.image_size,
    help="Short side in pixels.",
)
def demo(**arguments: Any) -> None:
    """Train a small detector twice per mode, compare every bit, write a report.

    Exit status: 0 all ran, 1 runs that must be equal differ, 2 an option or a file cannot be used,
    3 the program failed, 128 + n after signal n (the report then has what ran).
    """
    # dict.fromkeys: a mode given twice is still run twice, not four times.
    options = DemoOptions(**{**arguments, "modes": tuple(dict.fromkeys(arguments["modes"]))})
    try:
        _run_demo(options)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except click.ClickException:
        raise
    except (OSError, OverflowError, RecursionError, UnicodeError) as error:
        raise _CannotUse(f"truncdet demo: {type(error).__name__}: {error}") from error
    except Exception:
        # 1 means that bits differed, so an error of the program must be another number.
        traceback.print_exc()
        raise SystemExit(3) from None


def _run_demo(options: DemoOptions) -> None:
    try:
        from rich.console import Console

        from truncdet._demo import run_demo
        from truncdet._errors import TruncdetError
    except ModuleNotFoundError as error:
        raise _CannotUse(
            f"truncdet demo: package {error.name} must be installed, got none"
        ) from error
    try:
        status = run_demo(options, Console(highlight=False))
    except (DemoError, TruncdetError) as error:
        raise _CannotUse(str(error)) from error
    raise SystemExit(status)


main.add_command(_cli_audit.audit)
main.add_command(_cli_audit.compare)
main.add_command(_cli_doctor.doctor)


class _CannotUse(click.ClickException):
    """Printed as `Error: ...`, without a traceback."""

    exit_code = 2


@main.command()
@click.option(
    "--enable",
    is_flag=True,
    help="As under truncdet.enable(): import and patch every installed framework first.",
)
def status(enable: bool) -> None:
    """Print what truncdet covers, what it does not, and what its own operators promise.

    Nothing is patched in a process that has just started, so without --enable the first table tells
    what is installed. README explains tiers and letters.
    """
    import truncdet
    from truncdet._status import operators_text

    if not enable:
        click.echo(f"{truncdet.status()}\n\n{operators_text()}")
        return
    try:
        with truncdet.deterministic() as table:
            click.echo(f"{table}\n\n{operators_text()}")
    except truncdet.TruncdetError as error:
        raise _CannotUse(f"truncdet status: {error}") from error


@main.command("build-info")
def build_info() -> None:
    """Print which extension is loaded, as JSON."""
    import truncdet

    click.echo(json.dumps(truncdet.build_info(), indent=1, default=str))
