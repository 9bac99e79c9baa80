"""One switch for a whole program: seeds, flags, patches and the strict checker, undone exactly.

Scopes form a stack. Each records how to put back what it found, so nested scopes and exceptions
leave every flag, environment variable, patch and random state as it was before them. The state
is the process's, as the flags are: threads must not open overlapping scopes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from truncdet import _flags, _frameworks, _seed, _strict
from truncdet._errors import TruncdetError
from truncdet._mode import check_mode
from truncdet._scopes import Scope, stack
from truncdet._status import Status, status

_MODES = ("fixed_point", "truncate", "off")


_enabled: list[Scope] = []  # those of the stack that enable() opened
_lock = threading.RLock()


def enable(
    *,
    seed: int | None = None,
    mode: str = "fixed_point",
    strict: bool | str = False,
    frameworks: Sequence[str] | None = None,
    verbose: bool = False,
) -> Status:
    """Makes the program repeatable until `disable`; a second call replaces the first.

    Example:
        >>> import truncdet
        >>> table = truncdet.enable(seed=0)
        >>> truncdet.disable()
        True

    Args:
        seed: seeds Python, NumPy and torch (CPU and CUDA); None leaves the generators alone.
        mode: for the frameworks that are patched: 'fixed_point', 'truncate', or 'off', which
            leaves their operators alone but still sets seeds and flags. torch's own operators are
            left alone by 'truncate' too.
        strict: True raises when a CUDA operator runs, forward or backward, that is known to differ
            from run to run and is not covered; 'warn' warns once per operator.
        frameworks: those to patch, of 'torch' (its own operators), 'torchvision', 'mmcv', 'mmdet'
            and 'detectron2'; None for all that are installed. Patching imports them; one that is
            installed but cannot be imported is left, and the table says so.
        verbose: print the status table.

    Returns:
        The status table, notes included (`truncdet.status()` gives it again).

    Raises:
        ValueError: for an unknown mode or level, a seed outside [0, 2^63), or a framework that is
            unknown or not installed.
        TypeError: for a seed that is not an integer, or frameworks that are not a list of names.
        TruncdetError: if an installed framework's version is outside the tested range. After any
            exception nothing of this call is left, and an earlier `enable` has ended.
    """
    arguments = _checked("enable", seed, mode, strict, frameworks)
    with _lock:
        disable()
        _enabled.append(_open(*arguments))
    try:
        return _told(verbose)
    except BaseException:
        disable()
        raise


def disable() -> bool:
    """Undoes `enable`: flags, environment, patches and random states; False if not enabled.

    Example:
        >>> import truncdet
        >>> truncdet.disable()
        False

    Returns:
        Whether there was something to undo.

    Raises:
        TruncdetError: inside a `deterministic` block that was opened after `enable`, since that
            block would bring the state back when it ends; and with `strict` inside a dispatch
            mode entered since. Nothing is undone then.
    """
    with _lock:
        if not _enabled:
            return False
        scope = _enabled[-1]
        if stack[-1] is not scope:
            raise TruncdetError(
                "disable: enable() must be the innermost scope, got an open deterministic() block"
            )
        if scope.checker is not None:
            _strict.check_innermost(scope.checker)
        _close(scope)
        return True


@contextmanager
def deterministic(
    *,
    seed: int | None = None,
    mode: str = "fixed_point",
    strict: bool | str = False,
    frameworks: Sequence[str] | None = None,
    verbose: bool = False,
) -> Iterator[Status]:
    """As `enable`, for a `with` block or a decorated function; blocks nest.

    With a seed, the random states at the end are those from before the block, as with
    `torch.random.fork_rng`: nothing that the block drew is visible outside. Without a seed the
    generators run on through the block.

    Example:
        >>> import torch, truncdet
        >>> with truncdet.deterministic(seed=0):
        ...     a = torch.rand(3)
        >>> with truncdet.deterministic(seed=0):
        ...     b = torch.rand(3)
        >>> torch.equal(a, b)
        True

    Args:
        seed: as for `enable`.
        mode: as for `enable`.
        strict: as for `enable`.
        frameworks: as for `enable`.
        verbose: as for `enable`.

    Raises:
        ValueError: as `enable`.
        TypeError: as `enable`.
        TruncdetError: as `enable`.
    """
    arguments = _checked("deterministic", seed, mode, strict, frameworks)
    with _lock:
        scope = _open(*arguments)
    try:
        yield _told(verbose)
    finally:
        with _lock:
            _close(scope)


class Hold:
    """A scope for hooks of trainers, which may never be told that their run has ended.

    It ends by `close` alone, not when it is garbage, and takes nothing with it that was opened
    after it: scopes above it keep what holds for them, and put this one's state back at their end.

    Args:
        seed: as for `enable`.
        mode: as for `enable`.
        strict: as for `enable`.
        frameworks: as for `enable`.

    Raises:
        ValueError: as `enable`.
        TypeError: as `enable`.
        TruncdetError: as `enable`.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        mode: str = "fixed_point",
        strict: bool | str = False,
        frameworks: Sequence[str] | None = None,
    ) -> None:
        arguments = _checked("deterministic", seed, mode, strict, frameworks)
        with _lock:
            self._scope = _open(*arguments)

    def enter(self, context: AbstractContextManager[Any]) -> None:
        """Enters a context that lasts as long as this scope."""
        self._scope.undo.enter_context(context)

    def callback(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Has a function called at the end."""
        self._scope.undo.callback(function, *arguments)

    def close(self) -> None:
        """Ends the scope; a second call does nothing."""
        with _lock:
            _release(self._scope)


def _checked(
    where: str,
    seed: int | None,
    mode: str,
    strict: bool | str,
    frameworks: Sequence[str] | None,
) -> tuple[int | None, str, bool | str, tuple[str, ...] | None]:
    if seed is not None:
        _seed.check_seed(seed, where)
    if mode == "snap":
        raise ValueError(
            f"{where}: mode must not be 'snap' for a whole program: RoIAlign's contributions do "
            "not have weight one"
        )
    return (
        seed,
        check_mode(mode, where, _MODES),
        _strict.check_level(strict, where),
        _frameworks.check_frameworks(frameworks, where),
    )


def _told(verbose: bool) -> Status:
    table = status()
    if verbose:
        table.print()
    return table


def _open(
    seed: int | None, mode: str, strict: bool | str, frameworks: tuple[str, ...] | None
) -> Scope:
    scope = Scope()
    # If a step fails, the ones before it are undone by the exit of this block.
    with scope.undo as undo:
        scope.notes += _flags.set_flags(undo)
        note = _seed.hash_seed_note()
        if note is not None:
            scope.notes.append(note)
        scope.failures = _frameworks.enter_patches(undo, mode, frameworks)
        scope.notes += [
            f"{name} is installed, cannot be imported and is not covered: {error}"
            for name, error in scope.failures.items()
        ]
        if seed is not None:
            undo.callback(_seed.saved_states())
            _seed.seed_all(seed)
        if strict:
            scope.checker = _strict.StrictMode(strict)
            scope.checker.__enter__()
            undo.callback(_strict.leave, scope.checker)
        scope.undo = undo.pop_all()
    stack.append(scope)
    return scope


def _close(scope: Scope) -> None:
    """Closes a scope and those opened inside it that are still open, innermost first."""
    if scope not in stack:
        return
    inner_first = []
    while scope in stack:
        top = stack.pop()
        if top in _enabled:
            _enabled.remove(top)
        inner_first.append(top)
    # An exit stack runs all of its exits, the last pushed first, whatever one of them raises.
    with ExitStack() as closing:
        for top in reversed(inner_first):
            closing.push(top.undo)


def _release(scope: Scope) -> None:
    """Closes a scope; if others were opened inside it, the next one inherits what is to undo."""
    if scope not in stack or stack[-1] is scope:
        _close(scope)
        return
    above = stack[stack.index(scope) + 1]
    with ExitStack() as undo:
        undo.push(scope.undo)
        undo.push(above.undo)
        above.undo = undo.pop_all()
    stack.remove(scope)
