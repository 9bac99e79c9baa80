"""The commands `truncdet audit` and `truncdet compare`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from truncdet._audit_runs import Outcome
    from truncdet._compare import Verdict

_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)
COULD_NOT_TELL = 2


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--runs", type=click.IntRange(2, 100), default=2, help="How often to run it.")
@click.option(
    "--level", type=click.Choice(["module", "op"]), default="module", help="What is seen."
)
@click.option("--every", type=click.IntRange(1), default=1, help="Record each so manieth step.")
@click.option("--steps", type=click.IntRange(1), help="End each run after so many steps.")
@click.option(
    "--values/--no-values",
    default=True,
    help="Where runs differ, run twice more to count elements and units in the last place.",
)
@click.option("--json", "json_file", type=_FILE, help="Write the verdict as JSON.")
@click.option("--html", "html_file", type=_FILE, help="Write a page that explains it.")
@click.option("--traces", type=_FOLDER, help="Keep the traces in this folder.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def audit(
    runs: int,
    level: str,
    every: int,
    steps: int | None,
    values: bool,
    json_file: Path | None,
    html_file: Path | None,
    traces: Path | None,
    command: tuple[str, ...],
) -> None:
    """Run a training script several times, unmodified, and name the first difference.

    \b
        truncdet audit -- python train.py --epochs 1

    Exit status: 0 equal, 1 different, 2 could not tell.
    """
    from truncdet._audit_runs import Settings, audit_command

    settings = Settings(runs, level, every, steps, values)
    with tempfile.TemporaryDirectory(prefix="truncdet-traces-") as temporary:
        folder = Path(temporary) if traces is None else traces
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.glob("*.trace")):
                raise click.UsageError(f"--traces must be a folder without traces, got {folder}")
            outcome = audit_command(command, settings, folder)
            _write(outcome.verdict, json_file, html_file, outcome)
        except OSError as error:
            click.echo(f"truncdet audit: {error}", err=True)
            raise SystemExit(COULD_NOT_TELL) from None
    _conclude(outcome.verdict)


@click.command()
@click.argument("trace_a", type=_FILE)
@click.argument("trace_b", type=_FILE)
@click.option("--json", "json_file", type=_FILE, help="Write the verdict as JSON.")
@click.option("--html", "html_file", type=_FILE, help="Write a page that explains it.")
def compare(trace_a: Path, trace_b: Path, json_file: Path | None, html_file: Path | None) -> None:
    """Compare two traces that truncdet.record or truncdet audit wrote.

    Exit status: 0 equal, 1 different, 2 could not tell.
    """
    from truncdet._audit_runs import Outcome
    from truncdet._compare import compare as compare_traces
    from truncdet._trace_file import read

    try:
        pair = [read(path) for path in (trace_a, trace_b)]
        outcome = Outcome(compare_traces(*pair), pair)
        _write(outcome.verdict, json_file, html_file, outcome)
    except (OSError, ValueError) as error:
        click.echo(f"truncdet compare: {error}", err=True)
        raise SystemExit(COULD_NOT_TELL) from None
    _conclude(outcome.verdict)


def _write(
    verdict: Verdict, json_file: Path | None, html_file: Path | None, outcome: Outcome
) -> None:
    from truncdet._atomic import write_text

    if json_file is not None:
        write_text(json_file, json.dumps(verdict.as_dict(), indent=1) + "\n")
    if html_file is not None:
        from truncdet._report import page

        write_text(html_file, page(outcome))


def _conclude(verdict: Verdict) -> None:
    from truncdet._remedies import remedy

    click.echo(str(verdict))
    if verdict.equal_inputs:
        click.echo(f"equal before it: its inputs {', '.join(verdict.equal_inputs)}")
    if verdict.difference is not None:
        found = verdict.difference
        ulp = "" if found.max_ulp is None else f", up to {found.max_ulp} ulp"
        click.echo(f"{found.elements} elements differ, the first at {found.first_index}{ulp}")
    advice = remedy(verdict.place.key.op) if verdict.place else None
    if advice is not None:
        click.echo(f"what helps: {advice}")
    raise SystemExit({True: 0, False: 1, None: COULD_NOT_TELL}[verdict.equal])
