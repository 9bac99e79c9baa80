"""File writes that are all or nothing: a reader sees the old content or the new, never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces `path` with `content`; on any failure the old file is still there, whole."""
    # The temporary file must be in the same folder: os.replace is atomic in one file system only.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            # mkstemp makes the file readable by its owner alone; give it the usual permissions.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            file.write(content)
            file.flush()
            # Without it a crash of the machine may leave the new name on an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """`write_bytes` for text, as UTF-8 with unchanged line ends."""
    write_bytes(path, text.encode("utf-8"))
