"""Result files as markdown tables: on the screen, in README.md and in experiments/README.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Result = dict[str, Any]
MIB = 1 << 20


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, padded so that it also reads as plain text."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _error(value: float) -> str:
    return f"{value:.1e}"


def _mib(value: float | None) -> str:
    return _number(None if value is None else value / MIB, 1)


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "-"}[value]


def overhead_times(result: Result) -> str:
    """Forward and backward in milliseconds, and what our time is of the native one."""
    rows = []
    for row in result["rows"]:
        limit = f"{row['backward_limit']:.2f}" if row["layout"] == "NCHW" else "-"
        cells = [row["name"], row["layout"]]
        for part in ("forward", "backward"):
            times = (row[side][f"{part}_ms"] for side in ("native", "truncdet"))
            cells += [*(_number(time, 3) for time in times), _number(row[f"{part}_ratio"], 2)]
        rows.append([*cells, limit])
    header = ("case, float32", "layout", "forward, torchvision, ms", "truncdet, ms", "ratio")
    return table((*header, "backward, torchvision, ms", "truncdet, ms", "ratio", "limit"), rows)


def overhead_details(result: Result) -> str:
    """Memory, errors and repeatability of the backward, each torchvision / truncdet."""
    rows = []
    for row in result["rows"]:
        sides = (row["native"], row["truncdet"])
        cells = [row["name"], row["layout"], _mib(row["output_bytes"])]
        cells += [_mib(side["backward_peak_bytes"]) for side in sides]
        for part, norm in (("backward", "max"), ("backward", "l2"), ("forward", "max")):
            found = (row["errors"] or {}).get(part)
            pair = (found[side][norm] for side in ("native", "truncdet")) if found else ()
            cells.append(" / ".join(map(_error, pair)) or "-")
        cells.append(" / ".join(_yes(side["bits_equal"]) for side in sides))
        rows.append(cells)
    header = ("case, float32", "layout", "gradient, MiB", "peak, torchvision, MiB", "truncdet, MiB")
    errors = ("backward error, max", "backward error, l2", "forward error, max")
    return table((*header, *errors, "bits repeat"), rows)


def scatter_times(result: Result) -> str:
    """scatter_add and index_add in milliseconds."""
    rows = []
    for row in result["scatter"]:
        sides = ("native", "deterministic", "truncdet")
        bits = " / ".join(_yes(row[f"{side}_bits_equal"]) for side in sides)
        shape = f"{row['rows']} x {row['width']} into {row['cells']}, {row['indices']}"
        times = [_number(row[f"{side}_ms"], 3) for side in sides]
        rows.append([row["operator"], shape, *times, _number(row["ratio"], 2), bits])
    header = ("operator", "rows", "atomics, ms", "deterministic switch, ms", "truncdet, ms")
    return table((*header, "truncdet / atomics", "bits repeat"), rows)


def resample_times(result: Result) -> str:
    """Backward of interpolate and the adaptive pools in milliseconds."""
    rows = []
    for row in result.get("resample", []):
        sides = ("native", "deterministic", "truncdet")
        bits = " / ".join(_yes(row[f"{side}_bits_equal"]) for side in sides)
        times = [_number(row[f"{side}_ms"], 3) for side in sides]
        peaks = (row[f"{side}_peak_bytes"] for side in ("native", "truncdet"))
        errors = (row["errors"][side]["max"] for side in ("native", "truncdet"))
        cells = [row["operator"], row["shape"], *times, _number(row["ratio"], 2)]
        rows.append([*cells, " / ".join(map(_mib, peaks)), " / ".join(map(_error, errors)), bits])
    header = ("backward, float32", "input to output", "atomics, ms", "deterministic switch, ms")
    tail = ("peak, MiB", "error, max", "bits repeat")
    return table((*header, "truncdet, ms", "truncdet / atomics", *tail), rows)


def sampling_times(result: Result) -> str:
    """Backward of grid_sample and ms_deform_attn, by the fastest native kernel at hand."""
    rows = []
    for row in result.get("sampling", []):
        native, ours = row["native"][row["native_name"]], row["truncdet"]
        times = [_number(side["backward_ms"], 3) for side in (native, ours)]
        others = (
            f"{name} {_number(side['backward_ms'], 1)}"
            for name, side in row["native"].items()
            if name != row["native_name"]
        )
        bits = " / ".join(_yes(side["bits_equal"]) for side in (native, ours))
        peaks = [_mib(side["backward_peak_bytes"]) for side in (native, ours)]
        ratio, limit = _number(row["ratio"], 2), f"{row['limit']:.2f}"
        cells = [row["name"], row["native_name"], *times, ratio, limit]
        rows.append([*cells, ", ".join(others) or "-", *peaks, bits])
    header = ("backward, float32", "native", "native, ms", "truncdet, ms", "ratio", "limit")
    peaks_of = ("peak, native, MiB", "truncdet, MiB")
    return table((*header, "others, ms", *peaks_of, "bits repeat"), rows)


def pooling_times(result: Result) -> str:
    """roi_pool and the position-sensitive operators in milliseconds."""
    rows = []
    for row in result.get("pooling", []):
        sides = (row["native"], row["truncdet"])
        cells = [row["name"]]
        for part in ("forward", "backward"):
            cells += [_number(side[f"{part}_ms"], 3) for side in sides]
            cells.append(_number(row[f"{part}_ratio"], 2))
        cells.append(f"{row['limit']:.2f}")
        cells += [_mib(side["backward_peak_bytes"]) for side in sides]
        errors = row["errors"] or {}
        pair = [_error(errors[side]["max"]) for side in ("native", "truncdet") if side in errors]
        bits = " / ".join(_yes(side["bits_equal"]) for side in sides)
        rows.append([*cells, " / ".join(pair) or "-", bits])
    header = ("float32", "forward, torchvision, ms", "truncdet, ms", "ratio")
    times = ("backward, torchvision, ms", "truncdet, ms", "ratio", "limit")
    tail = ("peak, torchvision, MiB", "truncdet, MiB", "backward error, max", "bits repeat")
    return table((*header, *times, *tail), rows)


def train_step(result: Result) -> str:
    """A training step of Mask R-CNN, plain and patched."""
    return _trainings("precision", result)


def frameworks(result: Result) -> str:
    """A training step of detectors of mmdet and detectron2, plain and patched."""
    return _trainings("detector", result)


def _trainings(what: str, result: Result) -> str:
    rows = []
    for name, found in result["comparisons"].items():
        cells = [name, str(result["steps"][name])]
        for key, show in (("ms_per_step", lambda x: _number(x, 1)), ("peak_bytes", _mib)):
            cells += [show(found[key][mode]) for mode in ("off", "fixed_point")]
            cells.append(_number(found[f"{key}_ratio"], 3))
        for mode in ("off", "fixed_point"):
            cells.append(_difference(found["repeats"][mode]))
        rows.append(cells)
    step = (what, "steps", "step, plain, ms", "patched, ms", "ratio")
    peak = ("peak, plain, MiB", "patched, MiB", "ratio")
    return table((*step, *peak, "two plain runs", "two patched runs"), rows)


def _difference(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    if found["first_difference"] is not None:
        return f"differ from step {found['first_difference']}"
    return "equal" if found["weights_equal"] else "losses equal, weights differ"


# What a result file of each experiment shows, in one sentence.
CLAIMS = {
    "overhead": "RoIAlign repeats its bits, within the limits on time, memory and error",
    "train_step": "Mask R-CNN R50-FPN trains twice to equal losses and weights, and no slower",
    "frameworks": "Detectors of mmdet and detectron2 train twice to equal losses, and no slower",
}
NOT_MEASURED = "not measured yet"
# Those of which a caption names the version, where they took part.
LIBRARIES = ("torch", "torchvision", "mmcv", "mmdet", "detectron2")


def claims(results: dict[str, Result]) -> str:
    """One row per claim and result file; `results` by file name."""
    rows = []
    for experiment, claim in CLAIMS.items():
        found = {n: r for n, r in results.items() if r["experiment"] == experiment}
        if not found:
            command = f"`python experiments/{experiment}.py`"
            rows.append([claim, command, NOT_MEASURED, "-", "-", NOT_MEASURED])
        for name, result in found.items():
            missed = [check["name"] for check in result["checks"] if check["passed"] is not True]
            outcome = f"{len(result['checks'])} conditions met"
            if missed:
                outcome = f"missed {len(missed)} of {len(result['checks'])}: {'; '.join(missed)}"
            link = f"[{name}](results/{name})"
            command = f"`{result['command']}`"
            rows.append([claim, command, result["device"], _commit(result), link, outcome])
    return table(("claim", "command", "hardware", "commit", "result file", "outcome"), rows)


def _commit(result: Result) -> str:
    commit = (result["commit"] or "not known")[:12]
    return f"{commit}, with changes" if result["dirty"] else commit


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "overhead": ("overhead", overhead_times),
    "overhead_details": ("overhead", overhead_details),
    "scatter": ("overhead", scatter_times),
    "resample": ("overhead", resample_times),
    "sampling": ("overhead", sampling_times),
    "pooling": ("overhead", pooling_times),
    "train_step": ("train_step", train_step),
    "frameworks": ("frameworks", frameworks),
}


def region(name: str, results: dict[str, Result]) -> str:
    """What stands between `<!-- table: NAME -->` and `<!-- end -->`.

    Raises:
        ValueError: there is no table of this name.
    """
    if name == "claims":
        return claims(results)
    if name not in TABLES:
        names = ", ".join(("claims", *TABLES))
        raise ValueError(f"tables: marker must be one of {names}, got {name!r}")
    experiment, render = TABLES[name]
    found = [result for result in results.values() if result["experiment"] == experiment]
    if not found:
        return f"*{NOT_MEASURED.capitalize()}: `python experiments/{experiment}.py` measures it.*"
    return "\n\n".join(f"{_caption(result)}\n\n{render(result)}" for result in found)


def _caption(result: Result) -> str:
    versions = result["versions"]
    libraries = ", ".join(f"{name} {versions[name]}" for name in LIBRARIES if name in versions)
    return f"{result['device']}, {libraries}, commit {_commit(result)}, `{result['command']}`:"
