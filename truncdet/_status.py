"""What is covered and what is not, as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from truncdet._frameworks import installed
from truncdet._operators import ROWS
from truncdet._scopes import failures, notes
from truncdet._status_rows import PARTS, framework_rows, own_rows, torch_rows
from truncdet._status_rows import Row as Row
from truncdet._text_table import aligned


@dataclass(frozen=True)
class Status:
    """The table that `truncdet.status()` returns; `str()` of it is plain text."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns rows, notes and operators as plain lists and dicts, ready for JSON."""
        operators = [
            {name: list(x) if isinstance(x, tuple) else x for name, x in row._asdict().items()}
            for row in ROWS
        ]
        rows = [asdict(row) for row in self.rows]
        return {"rows": rows, "notes": list(self.notes), "operators": operators}

    def print(self) -> None:
        """Prints the table, through rich where it is installed."""
        try:
            from rich.console import Console
            from rich.table import Column, Table
        except ImportError:
            print(self)
            return
        table = Table(*(Column(name, overflow="fold") for name in _HEADER))
        for cells in self._cells():
            table.add_row(*cells)
        console = Console(markup=False)
        console.print(table)
        for note in self.notes:
            console.print(f"note: {note}")

    def __str__(self) -> str:
        table = aligned((_HEADER, *self._cells()))
        return "\n".join([table, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (row.operator, row.framework, row.tier, row.covered_by, row.mode) for row in self.rows
        ]


_HEADER: tuple[str, ...] = ("operator", "framework", "tier", "covered by", "mode")


def status() -> Status:
    """Returns what truncdet covers right now, operator by operator; it imports no framework.

    Rows are about the whole process; how many layers `convert` has converted is a note.

    Example:
        >>> import truncdet
        >>> truncdet.status().rows[0].operator
        'truncdet.roi_align'

    Returns:
        A `Status` with `rows` (operator, framework, tier, covered_by, mode), `notes`, `print()`
        and `as_dict()`; `covered_by` is 'not covered' where nothing holds.
    """
    from truncdet.integrations._alive import converted_notes

    failed = failures()
    rows = [
        row for name in PARTS if installed(name) for row in framework_rows(name, failed.get(name))
    ]
    return Status((*own_rows(), *torch_rows(), *rows), (*notes(), *converted_notes()))


def operators_text() -> str:
    """Returns what every operator of truncdet replaces and promises, as an aligned table."""
    header = ("operator", "replaces", "forward", "backward", "devices", "dtypes", "error", "memory")
    cells = [
        (
            f"truncdet.{row.name}",
            *(row.replaces, row.forward, row.backward, row.devices, row.dtypes),
            *(row.error, row.memory),
        )
        for row in ROWS
    ]
    return aligned((header, *cells))
