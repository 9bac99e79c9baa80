"""A figure as a PNG file."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.figure import Figure

from truncdet._atomic import write_bytes


def save_png(path: Path, figure: Figure, program: str = "truncdet") -> None:
    """Writes the figure, all or nothing; `program` is what the file names as its maker."""
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": program})
    write_bytes(path, content.getvalue())
