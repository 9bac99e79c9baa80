"""The open scopes of the switch, and what they have to say: `_switch` opens them, `_status` reads.

The stack is the process's, as the flags and patches are that a scope changes.
"""

from __future__ import annotations

from contextlib import ExitStack

from truncdet import _strict


class Scope:
    """What one scope has changed: how to undo it, and what the status table says of it."""

    def __init__(self) -> None:
        self.undo = ExitStack()
        self.notes: list[str] = []
        self.failures: dict[str, str] = {}
        self.checker: _strict.StrictMode | None = None


stack: list[Scope] = []


def notes() -> tuple[str, ...]:
    """Returns what the open scopes have to say, each sentence once."""
    return tuple(dict.fromkeys(note for scope in stack for note in scope.notes))


def failures() -> dict[str, str]:
    """Returns the frameworks that open scopes could not import to patch them, and the errors."""
    return {name: error for scope in stack for name, error in scope.failures.items()}
