"""The options that mmdet's configs take, checked in one place with the same words."""

from __future__ import annotations

from collections.abc import Iterable

from truncdet.integrations._roi import checked


def check_keys(found: Iterable[object], known: tuple[str, ...], where: str) -> None:
    """Raises ValueError listing the known keys if there is another one.

    mmengine's `_delete_`, which tells a config to drop what it inherits, stays in it where there
    was nothing to drop; it says nothing to us.
    """
    for key in found:
        if key not in known and key != "_delete_":
            raise ValueError(f"{where}: keys must be among {', '.join(known)}, got {key!r}")


def check_recipe(mode: str, literal: object, where: str) -> tuple[str, bool]:
    """Returns mode and literal if there is such a recipe; else an error that names the choices."""
    checked(mode, where)
    if not isinstance(literal, bool):
        raise TypeError(f"{where}: literal must be True or False, got {literal!r}")
    if literal and mode != "truncate":
        raise ValueError(
            f"{where}: literal must be False unless mode is 'truncate', got True for mode {mode!r}"
        )
    return mode, literal
