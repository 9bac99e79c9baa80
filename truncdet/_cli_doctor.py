"""The command `truncdet doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Write the report as JSON, to '-' for the standard output.",
)
@click.option("--enable", is_flag=True, help="As it is under truncdet.enable().")
def doctor(json_file: Path | None, enable: bool) -> None:
    """Report versions, flags, variables, seeds, and operators that are covered or not."""
    import truncdet
    from truncdet._atomic import write_text

    if enable:
        with truncdet.deterministic():
            report = truncdet.doctor()
    else:
        report = truncdet.doctor()
    text = json.dumps(report.as_dict(), indent=1) + "\n"
    if json_file is None:
        click.echo(str(report))
    elif str(json_file) == "-":
        click.echo(text, nl=False)
    else:
        write_text(json_file, text)
