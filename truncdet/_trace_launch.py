"""Recording of an unmodified script: starts with its first optimizer, in the process that has it.

`environment` gives the variables under which a Python program, however it is started, records
itself: a `sitecustomize` on its path waits for torch to be imported and calls `install`.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

VARIABLE = "TRUNCDET_RECORD"
TAKEN = ".taken"  # ends the name of an empty file that keeps a trace's name for one process
# Imported by Python at its start. What was there before it, if anything, runs as well.
_SITECUSTOMIZE = """\
import importlib.machinery, importlib.util, os, sys

def _run_the_one_before():
    here = os.path.dirname(os.path.abspath(__file__))
    path = [p for p in sys.path if os.path.abspath(p or os.curdir) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))

class _AfterTorch:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            def exec_module(module):
                run(module)
                from truncdet._trace_launch import install
                install()
            spec.loader.exec_module = exec_module
        return spec

_run_the_one_before()
sys.meta_path.insert(0, _AfterTorch())
"""


def environment(
    folder: Path, trace: Path, settings: dict[str, Any], base: dict[str, str]
) -> dict[str, str]:
    """`base` with what makes a Python program record itself into `trace`.

    Args:
        folder: an existing folder for the start-up file.
        trace: file to write; `_own_path` says what other processes than the first write.
        settings: level, every, steps (None: all) and keep (None, or a place as a list).
        base: environment to start from.
    """
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")
    paths = [str(folder), *filter(None, [base.get("PYTHONPATH", "")])]
    wanted = {"trace": str(trace.resolve()), **settings}
    return {**base, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: json.dumps(wanted)}


def install() -> None:
    """Waits for the first optimizer, then for the first call of a module with its parameters."""
    settings = json.loads(os.environ[VARIABLE])
    import torch

    optimizer_class, module_class = torch.optim.Optimizer, torch.nn.Module
    make, call = optimizer_class.__init__, module_class.__call__
    known: list[weakref.ref[torch.optim.Optimizer]] = []

    def remembered(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        known.append(weakref.ref(self))

    def first_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = next((o for ref in known if (o := ref()) is not None and _of(o, self)), None)
        if optimizer is not None and not torch.compiler.is_compiling():
            optimizer_class.__init__ = make  # type: ignore[method-assign]
            module_class.__call__ = call  # type: ignore[method-assign]
            _begin(self, optimizer, settings)
        return call(self, *args, **kwargs)

    optimizer_class.__init__ = remembered  # type: ignore[method-assign]
    module_class.__call__ = first_call  # type: ignore[method-assign]


def _of(optimizer: Any, module: Any) -> bool:
    mine = {id(p) for p in module.parameters()}
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    # A part of the model, called before the whole, has only some of them.
    return bool(theirs) and all(id(p) in mine for p in theirs)


def _begin(module: Any, optimizer: Any, settings: dict[str, Any]) -> None:
    from truncdet._record import record
    from truncdet._trace_file import Key
    from truncdet._trace_recorder import Place

    path = _own_path(settings["trace"])
    keep = settings.get("keep")
    place = None if keep is None else Place(keep[0], Key(*keep[1]), keep[2])
    stack = ExitStack()
    trace = stack.enter_context(
        record(module, optimizer, settings["level"], settings["every"], path=path, keep=place)
    )

    def end() -> None:
        # Whether the script ended well is its exit status; the trace itself is whole.
        stack.close()
        if trace.kept is not None:
            import torch

            values = {"place": json.dumps(keep), "values": trace.kept["values"]}
            torch.save(values, f"{path}.values")

    atexit.register(end)
    steps = settings.get("steps")
    if steps is not None:
        optimizer.register_step_post_hook(_stop_after(steps))


def _own_path(trace: str) -> Path:
    """The file of this process: `trace` of rank 0, or of a process of no rank that no other one
    started; with '.n' of rank n, '.process-n' of the n-th that `multiprocessing` started, and
    '.again-n' of one of several that look alike."""
    own = trace
    rank = os.environ.get("RANK")
    # Without an import: who has not imported it was not started by it.
    multiprocessing = sys.modules.get("multiprocessing.process")
    started = () if multiprocessing is None else multiprocessing.current_process()._identity
    if rank is not None:
        own = trace if rank == "0" else f"{trace}.{rank}"
    elif started:
        own = f"{trace}.process-{'-'.join(map(str, started))}"
    number, path = 0, own
    while True:
        try:
            os.close(os.open(f"{path}{TAKEN}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            number += 1
            path = f"{own}.again-{number}"
        else:
            return Path(path)


def written(trace: Path) -> Path | None:
    """The trace of a run: that of the first process, or of the first of those it started; None if
    no process wrote one."""
    if trace.exists():
        return trace
    others = trace.parent.glob(f"{trace.name}.*")
    traces = [path for path in others if path.suffix not in (TAKEN, ".values")]
    # Shorter numbers are smaller ones.
    return min(traces, key=lambda path: (len(path.name), path.name), default=None)


def _stop_after(steps: int) -> Any:
    done = [0]

    def stop(*_: Any) -> None:
        done[0] += 1
        if done[0] >= steps:
            sys.stdout.flush()
            sys.stderr.flush()
            atexit._run_exitfuncs()
            os._exit(0)

    return stop
