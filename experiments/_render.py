"""Result files as markdown tables: on the screen, in README.md and in experiments/README.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from _coco_render import coco_evaluate, coco_map, coco_resume
from _markdown import error, mib, number, table, yes
from _render_flips import flip_rate, literal_cast
from _render_record import record_cost
from _render_stories import batch_norm, story

from truncdet._operators import ROWS, OperatorRow

Result = dict[str, Any]


def overhead_times(result: Result) -> str:
    """Forward and backward in milliseconds, and what our time is of the native one."""
    rows = []
    for row in result["rows"]:
        limit = f"{row['backward_limit']:.2f}" if row["layout"] == "NCHW" else "-"
        cells = [row["name"], row["layout"]]
        for part in ("forward", "backward"):
            times = (row[side][f"{part}_ms"] for side in ("native", "truncdet"))
            cells += [*(number(time, 3) for time in times), number(row[f"{part}_ratio"], 2)]
        rows.append([*cells, limit])
    header = ("case, float32", "layout", "forward, torchvision, ms", "truncdet, ms", "ratio")
    return table((*header, "backward, torchvision, ms", "truncdet, ms", "ratio", "limit"), rows)


def overhead_details(result: Result) -> str:
    """Memory, errors and repeatability of the backward, each torchvision / truncdet."""
    rows = []
    for row in result["rows"]:
        sides = (row["native"], row["truncdet"])
        cells = [row["name"], row["layout"], mib(row["output_bytes"])]
        cells += [mib(side["backward_peak_bytes"]) for side in sides]
        for part, norm in (("backward", "max"), ("backward", "l2"), ("forward", "max")):
            found = (row["errors"] or {}).get(part)
            pair = (found[side][norm] for side in ("native", "truncdet")) if found else ()
            cells.append(" / ".join(map(error, pair)) or "-")
        cells.append(" / ".join(yes(side["bits_equal"]) for side in sides))
        rows.append(cells)
    header = ("case, float32", "layout", "gradient, MiB", "peak, torchvision, MiB", "truncdet, MiB")
    errors = ("backward error, max", "backward error, l2", "forward error, max")
    return table((*header, *errors, "bits repeat"), rows)


def scatter_times(result: Result) -> str:
    """scatter_add and index_add in milliseconds."""
    rows = []
    for row in result["scatter"]:
        sides = ("native", "deterministic", "truncdet")
        bits = " / ".join(yes(row[f"{side}_bits_equal"]) for side in sides)
        shape = f"{row['rows']} x {row['width']} into {row['cells']}, {row['indices']}"
        times = [number(row[f"{side}_ms"], 3) for side in sides]
        rows.append([row["operator"], shape, *times, number(row["ratio"], 2), bits])
    header = ("operator", "rows", "atomics, ms", "deterministic switch, ms", "truncdet, ms")
    return table((*header, "truncdet / atomics", "bits repeat"), rows)


def resample_times(result: Result) -> str:
    """Backward of interpolate and the adaptive pools in milliseconds."""
    rows = []
    for row in result.get("resample", []):
        sides = ("native", "deterministic", "truncdet")
        bits = " / ".join(yes(row[f"{side}_bits_equal"]) for side in sides)
        times = [number(row[f"{side}_ms"], 3) for side in sides]
        peaks = (row[f"{side}_peak_bytes"] for side in ("native", "truncdet"))
        errors = (row["errors"][side]["max"] for side in ("native", "truncdet"))
        cells = [row["operator"], row["shape"], *times, number(row["ratio"], 2)]
        rows.append([*cells, " / ".join(map(mib, peaks)), " / ".join(map(error, errors)), bits])
    header = ("backward, float32", "input to output", "atomics, ms", "deterministic switch, ms")
    tail = ("peak, MiB", "error, max", "bits repeat")
    return table((*header, "truncdet, ms", "truncdet / atomics", *tail), rows)


def sampling_times(result: Result) -> str:
    """Backward of grid_sample and ms_deform_attn, by the fastest native kernel at hand."""
    rows = []
    for row in result.get("sampling", []):
        native, ours = row["native"][row["native_name"]], row["truncdet"]
        times = [number(side["backward_ms"], 3) for side in (native, ours)]
        others = (
            f"{name} {number(side['backward_ms'], 1)}"
            for name, side in row["native"].items()
            if name != row["native_name"]
        )
        bits = " / ".join(yes(side["bits_equal"]) for side in (native, ours))
        peaks = [mib(side["backward_peak_bytes"]) for side in (native, ours)]
        ratio, limit = number(row["ratio"], 2), f"{row['limit']:.2f}"
        cells = [row["name"], row["native_name"], *times, ratio, limit]
        rows.append([*cells, ", ".join(others) or "-", *peaks, bits])
    header = ("backward, float32", "native", "native, ms", "truncdet, ms", "ratio", "limit")
    peaks_of = ("peak, native, MiB", "truncdet, MiB")
    return table((*header, "others, ms", *peaks_of, "bits repeat"), rows)


def ways_times(result: Result) -> str:
    """Native, truncdet, trick and switch: forward and backward, and a whole training step."""
    rows = []
    for row in result.get("ways", []):
        native, *others = (row["ms"][way] for way in ("native", "truncdet", "trick", "switch"))
        cells = [row["name"], number(native, 3)]
        for ms in others:
            cells.append("-" if ms is None else f"{ms:.3f} ({ms / native:.2f})")
        if row["why"].get("switch"):
            cells[-1] = f"none: {row['why']['switch']}"
        rows.append(cells)
    header = ("forward and backward, float32", "native, ms", "truncdet, ms (by native)")
    return table((*header, "trick, ms", "official switch, ms"), rows)


def already_times(result: Result) -> str:
    """Operators of PyTorch that may repeat as they are, and what they take."""
    rows = []
    for row in result.get("already", []):
        times = [number(row[f"{side}_ms"], 3) for side in ("native", "truncdet")]
        bits = " / ".join(yes(row[f"{side}_bits_equal"]) for side in ("native", "truncdet"))
        rows.append([row["operator"], row["case"], *times, bits])
    header = ("operator", "case, float32", "PyTorch, ms", "truncdet, ms", "bits repeat")
    return table(header, rows)


def operators(results: dict[str, Result]) -> str:
    """Every operator of truncdet; where PyTorch was seen to repeat by itself, a column says so."""
    found = [row for result in results.values() for row in result.get("already", [])]
    rows = [[_names(row), *_promises(row)] for row in ROWS]
    header = ["operator", "replaces", "forward", "backward", "devices", "dtypes"]
    header += ["error of a sum", "extra memory", "originals covered by"]
    if any(case["native_bits_equal"] for case in found):
        header.append("PyTorch's own repeated as well")
        for cells, row in zip(rows, ROWS, strict=True):
            cells.append(_repeated(row, found))
    return table(header, rows)


def _names(row: OperatorRow) -> str:
    return ", ".join(f"`{name}`" for name in (row.name, *row.also))


def _promises(row: OperatorRow) -> list[str]:
    promises = [row.replaces, row.forward, row.backward, row.devices, row.dtypes]
    return [*promises, row.error, row.memory, ", ".join(row.patches) or "-"]


def _repeated(row: OperatorRow, found: Sequence[dict[str, Any]]) -> str:
    cases = [case for case in found if case["operator"] == row.name and case["native_bits_equal"]]
    return "; ".join(f"{case['case']}: {number(case['native_ms'], 3)} ms" for case in cases) or "-"


def deform_times(result: Result) -> str:
    """Forward and whole backward of deform_conv2d, by torchvision's."""
    rows = []
    for row in result.get("deform", []):
        sides = (row["torchvision"], row["truncdet"])
        cells = [row["name"]]
        for part in ("forward", "backward"):
            times = (number(side[f"{part}_ms"], 3) for side in sides)
            cells += [*times, number(row[f"{part}_ratio"], 2)]
        peaks = [mib(side["backward_peak_bytes"]) for side in sides]
        bits = " / ".join(yes(side["bits_equal"]) for side in sides)
        rows.append([*cells, f"{row['limit']:.2f}", *peaks, bits])
    header = ("3x3, float32", "forward, torchvision, ms", "truncdet, ms", "ratio")
    backward = ("backward, torchvision, ms", "truncdet, ms", "ratio", "limit")
    return table(
        (*header, *backward, "peak, torchvision, MiB", "truncdet, MiB", "bits repeat"), rows
    )


def rotated_times(result: Result) -> str:
    """Forward and backward of roi_align_rotated, beside mmcv's kernels where there are any."""
    rows = []
    for row in result.get("rotated", []):
        sides = (row["native"], row["truncdet"])
        cells = [row["name"]]
        for part, ratio in (("forward_ms", "forward_ratio"), ("backward_ms", "ratio")):
            cells += [number(side[part] if side else None, 3) for side in sides]
            cells.append(number(row[ratio], 2))
        peaks = [mib(side["backward_peak_bytes"] if side else None) for side in sides]
        errors = (row["errors"].get(name) for name in ("native", "truncdet"))
        found = " / ".join(error(e["backward"]["max"]) if e else "-" for e in errors)
        bits = " / ".join(yes(side["bits_equal"] if side else None) for side in sides)
        rows.append([*cells, f"{row['limit']:.2f}", *peaks, found, bits])
    header = ("case, float32", "forward, mmcv, ms", "truncdet, ms", "ratio", "backward, mmcv, ms")
    tail = ("peak, mmcv, MiB", "truncdet, MiB", "backward error, max", "bits repeat")
    return table((*header, "truncdet, ms", "ratio", "limit", *tail), rows)


def loss_times(result: Result) -> str:
    """Losses with their gradients, nms and topk."""
    rows = []
    for row in result.get("loss", []):
        native, ours = row["native"][row["native_name"]], row["truncdet"]
        times = [number(side["ms"], 3) for side in (native, ours)]
        others = (
            f"{name} {number(side['ms'], 3)}"
            for name, side in row["native"].items()
            if name != row["native_name"]
        )
        bits = " / ".join(yes(side["bits_equal"]) for side in (native, ours))
        peaks = [mib(side["peak_bytes"]) for side in (native, ours)]
        cells = [row["name"], row["native_name"], *times, number(row["ratio"], 2)]
        rows.append([*cells, ", ".join(others) or "-", *peaks, bits])
    header = ("operator, float32", "native", "native, ms", "truncdet, ms", "ratio", "others, ms")
    return table((*header, "peak, native, MiB", "truncdet, MiB", "bits repeat"), rows)


def pooling_times(result: Result) -> str:
    """roi_pool and the position-sensitive operators in milliseconds."""
    rows = []
    for row in result.get("pooling", []):
        sides = (row["native"], row["truncdet"])
        cells = [row["name"]]
        for part in ("forward", "backward"):
            cells += [number(side[f"{part}_ms"], 3) for side in sides]
            cells.append(number(row[f"{part}_ratio"], 2))
        cells.append(f"{row['limit']:.2f}")
        cells += [mib(side["backward_peak_bytes"]) for side in sides]
        errors = row["errors"] or {}
        pair = [error(errors[side]["max"]) for side in ("native", "truncdet") if side in errors]
        bits = " / ".join(yes(side["bits_equal"]) for side in sides)
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
        for key, show in (("ms_per_step", lambda x: number(x, 1)), ("peak_bytes", mib)):
            cells += [show(found[key][mode]) for mode in ("off", "fixed_point")]
            cells.append(number(found[f"{key}_ratio"], 3))
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
    "flip_rate": "How often two orders of a double sum round apart, at 24 bits and fewer",
    "record_cost": "Recording costs at most a quarter of a step and names roi_align's backward",
    "batch_norm": "The convolution's backward moves bits, batch normalisation does not",
    "digits": "Ten trainings of a small network from one seed end in one set of weights",
    "message_passing": "Ten trainings of a graph network from one seed end in one accuracy",
    "coco_map": "COCO's AP of equal trainings repeats to the last bit",
    "coco_evaluate": "Evaluation alone of fixed weights repeats to the last bit, with tied scores",
    "coco_resume": "A run stopped at half and resumed ends with the weights of one not stopped",
}
# What to type, where it is not a program of the experiment's name.
COMMANDS = {
    "coco_evaluate": "python experiments/coco_map.py --only-evaluate",
    "coco_resume": "python experiments/coco_map.py --stop-and-resume",
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
            command = f"`{_command(experiment)}`"
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


def _command(experiment: str) -> str:
    return COMMANDS.get(experiment, f"python experiments/{experiment}.py")


def _commit(result: Result) -> str:
    commit = (result["commit"] or "not known")[:12]
    return f"{commit}, with changes" if result["dirty"] else commit


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "overhead": ("overhead", overhead_times),
    "overhead_details": ("overhead", overhead_details),
    "scatter": ("overhead", scatter_times),
    "resample": ("overhead", resample_times),
    "sampling": ("overhead", sampling_times),
    "ways": ("overhead", ways_times),
    "already": ("overhead", already_times),
    "deform": ("overhead", deform_times),
    "rotated": ("overhead", rotated_times),
    "loss": ("overhead", loss_times),
    "pooling": ("overhead", pooling_times),
    "train_step": ("train_step", train_step),
    "frameworks": ("frameworks", frameworks),
    "flip_rate": ("flip_rate", flip_rate),
    "literal_cast": ("flip_rate", literal_cast),
    "batch_norm": ("batch_norm", batch_norm),
    "digits": ("digits", story),
    "message_passing": ("message_passing", story),
    "record_cost": ("record_cost", record_cost),
    "coco_map": ("coco_map", coco_map),
    "coco_evaluate": ("coco_evaluate", coco_evaluate),
    "coco_resume": ("coco_resume", coco_resume),
}

# Those that are made of all results, or can do without.
OVERVIEWS: dict[str, Callable[[dict[str, Result]], str]] = {
    "claims": claims,
    "operators": operators,
}


def region(name: str, results: dict[str, Result]) -> str:
    """What stands between `<!-- table: NAME -->` and `<!-- end -->`.

    Raises:
        ValueError: there is no table of this name.
    """
    if name in OVERVIEWS:
        return OVERVIEWS[name](results)
    if name not in TABLES:
        names = ", ".join((*OVERVIEWS, *TABLES))
        raise ValueError(f"tables: marker must be one of {names}, got {name!r}")
    experiment, render = TABLES[name]
    found = [result for result in results.values() if result["experiment"] == experiment]
    if not found:
        return f"*{NOT_MEASURED.capitalize()}: `{_command(experiment)}` measures it.*"
    return "\n\n".join(f"{_caption(result)}\n\n{render(result)}" for result in found)


def _caption(result: Result) -> str:
    versions = result["versions"]
    libraries = ", ".join(f"{name} {versions[name]}" for name in LIBRARIES if name in versions)
    return f"{result['device']}, {libraries}, commit {_commit(result)}, `{result['command']}`:"
