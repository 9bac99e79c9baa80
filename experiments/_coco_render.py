"""Results of coco_map.py as markdown tables."""

from __future__ import annotations

from typing import Any

from _markdown import mib, number, table

Result = dict[str, Any]


def coco_map(result: Result) -> str:
    """A row for every mode, and for every kind of AP; the full figures are those of one seed."""
    rows = []
    for mode, found in result["modes"].items():
        seeds = found["seeds"]
        if not seeds:
            continue
        first = next(iter(seeds.values()))
        for kind in result["iou_types"]:
            spreads = [s["spread"][kind] for s in seeds.values() if s["spread"][kind] is not None]
            cells = [mode, kind, *_repeats(first["ap"][kind])]
            cells += [repr(max(spreads)) if spreads else "-", _difference(seeds)]
            cells += [_weights(seeds), _mean(found["mean_ap"][kind])]
            time = result["timing"]["ms_per_step"].get(mode)
            rows.append([*cells, number(time, 1), mib(found["peak_bytes"])])
    header = ("mode", "AP of", "first run", "second run", "largest spread", "first difference")
    end = ("weights of repeats", "mean AP, 95 % interval", "step, ms", "peak, MiB")
    about = (
        f"{result['data']['name']}, {result['steps']} steps of {result['training']['batch']} "
        f"images, {_precision(result)}; {_timing(result)}."
    )
    return f"{table((*header, *end), rows)}\n\n{about}{_picture(result)}"


def coco_evaluate(result: Result) -> str:
    """Evaluation alone, by mode, plain and with rounded logits."""
    rows = []
    for group in result["groups"]:
        equal = {True: "equal", False: "differ"}
        cells = [group["mode"], "rounded" if group["ties"] else "as they are", str(group["runs"])]
        kind = result["iou_types"][-1]
        cells += [f"{group['tied_scores']} of {group['detections']}"]
        cells += [repr(value) for value in group["ap"][kind][:1]]
        rows.append([*cells, equal[group["ap_equal"]], equal[group["detections_equal"]]])
    header = ("mode", "logits", "evaluations", "detections with a tied score", "AP")
    return table((*header, "AP of all", "detections of all"), rows)


def coco_resume(result: Result) -> str:
    """A run that was stopped and resumed beside one that was not."""
    rows = []
    for mode, found in result["comparisons"].items():
        equal = [{True: "equal", False: "differ"}[found[key]] for key in ("losses", "weights")]
        equal.append({True: "equal", False: "differ"}[found["optimizer"]])
        kind = result["iou_types"][-1]
        ap = [repr(value) for value in found["ap"][kind]]
        rows.append([mode, f"{found['stopped_at']} of {result['steps']}", *equal, *ap])
    header = ("mode", "stopped after", "losses", "weights", "optimizer")
    return table((*header, "AP, not stopped", "AP, stopped and resumed"), rows)


def _repeats(values: list[float | None]) -> list[str]:
    shown = ["-" if value is None else repr(value) for value in values[:2]]
    return shown if len(shown) == 2 else [*shown, "-"]


def _difference(seeds: dict[str, Any]) -> str:
    compared = [found for found in seeds.values() if found["equal"] is not None]
    steps = [f["first_difference"] for f in compared if f["first_difference"] is not None]
    if not compared:
        return "-"
    return f"step {min(steps)}" if steps else "none"


def _weights(seeds: dict[str, Any]) -> str:
    equal = [found["equal"]["weights"] for found in seeds.values() if found["equal"] is not None]
    if not equal:
        return "-"
    alike = {True: "equal", False: "differ"}.get(equal[0]) if len(set(equal)) == 1 else None
    return alike or f"equal in {sum(equal)} of {len(equal)} seeds"


def _mean(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    if found["low"] is None:
        return f"{found['mean']:.4f}"
    return f"{found['mean']:.4f} ({found['low']:.4f} to {found['high']:.4f}, {found['n']} seeds)"


def _precision(result: Result) -> str:
    amp = str(result["training"]["amp"])
    return amp if amp == "float32" else f"{amp} autocast"


def _timing(result: Result) -> str:
    timing = result["timing"]
    if timing["apart"]:
        return f"step times from {timing['steps']} steps of each mode alone on the device"
    return "step times from the runs themselves, one at a time"


def _picture(result: Result) -> str:
    name = result.get("picture")
    return f"\n\n![losses and AP](results/{name})" if name else ""
