"""The main job: train a real detector twice plainly and twice with truncdet, compare every bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from truncdet._build import has_extension
from truncdet._demo_batches import Samples
from truncdet._demo_data import CocoSet, load_coco
from truncdet._demo_eval import EVAL_IMAGES
from truncdet._demo_memory import describe_peak
from truncdet._demo_options import BUNDLED, DemoError, DemoOptions
from truncdet._demo_plot import save_picture
from truncdet._demo_record import RunRecord, compare, compare_modes
from truncdet._demo_report import PICTURE, REPORT, Report, prepare_out
from truncdet._demo_screen import (
    NO_EXTENSION,
    ON_CPU,
    ON_CUDA,
    conclusion,
    step_table,
    summary_table,
)
from truncdet._demo_stop import Stop
from truncdet._demo_train import train_and_evaluate

# Seconds between two writes of the report while a run is going.
WRITE_EVERY = 5.0


def run_demo(options: DemoOptions, console: Console) -> int:
    """Runs the demo and returns the exit status.

    Returns:
        0 if all ran; 1 if the runs of mode fixed_point differ, which must not be; 128 + the
        signal's number after Ctrl-C or SIGTERM, with a valid report marked incomplete.

    Raises:
        DemoError: an option or a file it names cannot be used.
    """
    device = _device(options.device)
    training, held_out, where = _sets(options)
    prepare_out(options.out)
    on_cpu = device.type == "cpu"
    report = Report(
        options,
        device=device.type,
        device_name="cpu" if on_cpu else torch.cuda.get_device_name(device),
        data=_describe(training, held_out, where),
        perturbation="run B hands the RoIs to RoIAlign in another order" if on_cpu else None,
        peak_memory=describe_peak(device),
    )
    _introduce(console, report, training, where)
    with Stop() as stop:
        report.write()
        _run_all(report, training, held_out, device, stop.keep_going, console)
        report.write()
        picture = save_picture(
            options.out / PICTURE, report.runs, f"{_setting(report)}, seed {options.seed}"
        )
    _tables(console, report, where)
    names = [REPORT, *([PICTURE] if picture else [])]
    console.print(f"Written to {escape(str(options.out))}: {', '.join(names)}", soft_wrap=True)
    if not report.complete:
        console.print("[bold]Stopped early: the report has what ran and says so.[/]")
        return 128 + (stop.requested or 0)
    compared = compare_modes(report.runs, options.modes)
    proved = compared.get("fixed_point")
    failed = proved is not None and proved.first is not None
    verdict = "[bold red]FAILED[/]" if failed else "[bold green]Shown[/]"
    console.print(f"\n{verdict}: {conclusion(report.runs, compared, _setting(report), where)}")
    return 1 if failed else 0


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DemoError(
            "truncdet demo: --device must be cpu or auto on this machine, got cuda, and torch"
            " sees no CUDA device"
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _sets(options: DemoOptions) -> tuple[CocoSet, CocoSet, str]:
    """Training set, set to measure AP on, and the latter in words."""
    if (options.data is None) != (options.ann is None):
        given = "--data" if options.ann is None else "--ann"
        raise DemoError(f"truncdet demo: --data and --ann must be given together, got {given} only")
    if options.data is None or options.ann is None:
        if options.eval_ann is not None:
            raise DemoError("truncdet demo: --eval-ann must come with --data, got it alone")
        training = load_coco(BUNDLED, BUNDLED / "instances_train.json")
        held_out = load_coco(BUNDLED, BUNDLED / "instances_val.json")
    else:
        training = load_coco(options.data, options.ann)
        if options.eval_ann is None:
            count = min(len(training.images), EVAL_IMAGES)
            return training, training, f"{count} images it was trained on"
        held_out = load_coco(options.data, options.eval_ann, "--eval-ann")
        if held_out.categories.keys() != training.categories.keys():
            raise DemoError(
                "truncdet demo: --eval-ann must have the category ids of --ann"
                f" {list(training.categories)}, got {list(held_out.categories)}"
            )
    return training, held_out, f"{min(len(held_out.images), EVAL_IMAGES)} images it never saw"


def _describe(training: CocoSet, held_out: CocoSet, where: str) -> dict[str, Any]:
    """For the report: which images, and what was left out of them."""
    return {
        "train": training.file.name,
        "train_images": len(training.images),
        "train_boxes": training.box_count - training.crowd_count,
        "crowd_boxes_left_out": training.crowd_count,
        "empty_boxes_left_out": training.empty_boxes,
        "eval": held_out.file.name,
        "eval_on": where,
    }


def _setting(report: Report) -> str:
    return report.device_name + (", RoIs of run B in another order" if report.perturbation else "")


def _introduce(console: Console, report: Report, training: CocoSet, where: str) -> None:
    options, data = report.options, report.data
    left_out = [
        f"{data[key]} {name}"
        for key, name in (("crowd_boxes_left_out", "crowd"), ("empty_boxes_left_out", "empty"))
        if data[key]
    ]
    console.print(
        f"[bold]truncdet demo[/] on {report.device_name}: Faster R-CNN, random start, float32, seed"
        f" {options.seed}, {options.steps} steps of {options.batch} images, per mode"
        f" ({', '.join(options.modes)}) twice"
    )
    console.print(
        f"Data: {data['train_images']} images with {data['train_boxes']} boxes of"
        f" {len(training.categories)} classes ({escape(data['train'])})"
        + (f", left out: {' and '.join(left_out)} boxes" if left_out else "")
        + f"; AP on {where}"
    )
    console.print(ON_CPU if report.perturbation else ON_CUDA, style="italic")
    if "fixed_point" in options.modes and not has_extension(report.device):
        console.print(NO_EXTENSION, style="yellow")
    console.print()


def _run_all(
    report: Report,
    training: CocoSet,
    held_out: CocoSet,
    device: torch.device,
    keep_going: Callable[[], bool],
    console: Console,
) -> None:
    options = report.options
    train_samples = Samples(training, options.image_size)
    eval_samples = Samples(held_out, options.image_size)
    progress = Progress(
        TextColumn("{task.description:<13}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
        # A bar is for eyes; a log gets one line per run instead.
        disable=not console.is_terminal,
    )
    last_write = -WRITE_EVERY
    with progress:
        for mode in options.modes:
            for repeat in range(2):
                if not keep_going():
                    return
                record = RunRecord(mode, repeat)
                report.runs.append(record)
                task = progress.add_task(record.name, total=options.steps, note="")

                def on_step(record: RunRecord, task: Any = task) -> None:
                    nonlocal last_write
                    progress.update(task, advance=1, note=f"loss {record.losses[-1]:.3f}")
                    if time.monotonic() - last_write >= WRITE_EVERY:
                        report.write()
                        last_write = time.monotonic()

                start = time.monotonic()
                train_and_evaluate(
                    record, options, train_samples, eval_samples, device, keep_going, on_step
                )
                report.write()
                if not console.is_terminal:
                    seconds = time.monotonic() - start
                    console.print(f"{record.name}: {record.steps} steps in {seconds:.0f} s")


def _tables(console: Console, report: Report, where: str) -> None:
    for mode in report.options.modes:
        pair = [run for run in report.runs if run.mode == mode and run.steps]
        if len(pair) == 2:
            a, b = pair
            console.print()
            console.print(step_table(a, b, compare(a, b)))
    if report.runs:
        compared = compare_modes(report.runs, report.options.modes)
        console.print()
        console.print(summary_table(report.runs, compared, where))
        console.print(f"peak MB: {report.peak_memory}", style="dim")
