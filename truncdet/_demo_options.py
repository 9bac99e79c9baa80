"""What the user asked the demo to do, checked, and the error for what it cannot do."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

DEMO_MODES = ("off", "fixed_point", "truncate")
BUNDLED = Path(__file__).parent / "data" / "bccd_tiny"


class DemoError(ValueError):
    """An option, or a file that an option names, cannot be used; the text is for the user."""


@dataclass(frozen=True)
class DemoOptions:
    """The options of `truncdet demo`; `data`, `ann` and `eval_ann` are None for the bundled set."""

    steps: int = 200
    device: str = "auto"
    modes: tuple[str, ...] = ("off", "fixed_point")
    seed: int = 0
    out: Path = Path("truncdet-demo")
    data: Path | None = None
    ann: Path | None = None
    eval_ann: Path | None = None
    batch: int = 2
    image_size: int = 160

    def command(self) -> str:
        """The command line that repeats this demo."""
        parts = ["truncdet demo", f"--steps {self.steps}", f"--device {self.device}"]
        parts += [f"--mode {mode}" for mode in self.modes]
        parts += [f"--seed {self.seed}", f"--batch {self.batch}"]
        parts += [f"--image-size {self.image_size}"]
        for name, path in (("data", self.data), ("ann", self.ann), ("eval-ann", self.eval_ann)):
            if path is not None:
                parts.append(f"--{name} {shlex.quote(str(path))}")
        return " ".join(parts)
