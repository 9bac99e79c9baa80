"""What the demo prints: what is about to run, the tables, and the sentence at the end."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from truncdet._demo_record import Comparison, RunRecord

ON_CPU = (
    "A CPU adds in one fixed order, so plain training repeats here as well. To show what a GPU's"
    " atomics do, run B hands the RoIs to RoIAlign in another order and puts its output back: the"
    " same mathematics, other orders of addition in the backward pass. Every mode is treated so."
)
ON_CUDA = "Run B is a plain rerun of run A: same seed, same data, same GPU, cudnn.deterministic on."
NO_EXTENSION = (
    "No compiled kernels are loaded for this device: fixed_point runs on the pure-PyTorch"
    " reference, which gives the same bits but takes several times as long."
)
# Below it a detector has learnt so little that equal figures say little.
LEARNT_AP50 = 0.1
_TITLES = {
    "off": "off: torchvision's RoIAlign",
    "fixed_point": "fixed_point: truncdet's RoIAlign, proved to repeat",
    "truncate": "truncate: torchvision's RoIAlign behind rounded inputs, likely to repeat",
}


def steps_to_show(found: Comparison) -> list[int]:
    """First steps, those around the first differences, and last steps."""
    chosen = {0, 1, 2, found.steps - 2, found.steps - 1}
    for step in (found.loss_step, found.weights_step):
        if step is not None:
            chosen |= {step - 1, step, step + 1}
    return sorted(step for step in chosen if 0 <= step < found.steps)


def step_table(a: RunRecord, b: RunRecord, found: Comparison) -> Table:
    """Loss and weight digest of run A and run B at the steps worth a look."""
    where = f"none of {found.steps} losses and none of the weights differ"
    if found.first is not None:
        where = f"first step that differs: {_or_none(found.weights_step)} in the weights after it,"
        where += f" {_or_none(found.loss_step)} in the loss"
    table = Table(
        title=f"{_TITLES[a.mode]}\n{where}",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("step", justify="right")
    for name in ("loss A", "loss B"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("weights A", "weights B"):
        table.add_column(name, no_wrap=True)
    table.add_column("bits", no_wrap=True)
    previous = -1
    for step in steps_to_show(found):
        if step > previous + 1:
            table.add_row("...")
        previous = step
        same_loss = a.loss_digests[step] == b.loss_digests[step]
        same_weights = a.weights_digests[step] == b.weights_digests[step]
        both = same_loss and same_weights
        table.add_row(
            str(step),
            *(_mark(f"{run.losses[step]:.8f}", same_loss) for run in (a, b)),
            *(_mark(run.weights_digests[step], same_weights) for run in (a, b)),
            Text("equal", "green") if both else Text("differ", "bold red"),
        )
    return table


def _or_none(step: int | None) -> str:
    return "none" if step is None else str(step)


def _mark(text: str, same: bool) -> Text:
    return Text(text) if same else Text(text, "red")


def summary_table(runs: list[RunRecord], compared: dict[str, Comparison], where: str) -> Table:
    """One row per run."""
    table = Table(
        title=f"All runs; AP by pycocotools on {where}",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("run", no_wrap=True)
    for name in ("last loss", "weights", "first differs", "mAP", "AP50", "s/step", "peak MB"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        found = compared[run.mode]
        differs = "-" if found.steps == 0 else "never" if found.first is None else str(found.first)
        table.add_row(
            run.name,
            f"{run.losses[-1]:.6f}" if run.losses else "-",
            run.weights_digests[-1][:8] if run.weights_digests else "-",
            differs,
            _figure(run.ap, "{:.3f}"),
            _figure(run.ap50, "{:.3f}"),
            _figure(run.ms_per_step, "{:.4f}", 1e-3),
            _figure(run.peak_bytes, "{:.0f}", 1e-6),
        )
    return table


def _figure(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else form.format(value * factor)


def conclusion(
    runs: list[RunRecord], compared: dict[str, Comparison], device: str, where: str
) -> str:
    """One sentence: what these runs showed, and no more than that."""
    parts = []
    for mode, found in compared.items():
        name = "plain training (off)" if mode == "off" else f"training with truncdet ({mode})"
        if found.first is None:
            part = f"{name} repeated bit for bit, in all {found.steps} losses and all weights"
        else:
            part = (
                f"{name} did not repeat: it first differed at step {found.first}, by up to "
                f"{found.largest:.2g} in the loss"
            )
        parts.append(part)
    figures = [run.ap50 for run in runs if run.ap50 is not None]
    text = f"on {device}, " + ", while ".join(parts)
    if not figures:
        return text + "; there was no box to measure an AP on."
    text += f"; AP50 was {min(figures):.2f} to {max(figures):.2f} on {where}"
    if min(figures) < LEARNT_AP50:
        text += f", so little (below {LEARNT_AP50}) that equality says little: take more steps"
    return text + "."
