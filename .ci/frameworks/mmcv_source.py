"""Makes mmcv's sources compile with today's torch, and in a quarter of the time.

torch's headers dominate the compile time of each of its small files, so files are compiled in
groups: they are renamed, out of reach of setup.py's `*.cpp`, and new files include them.
"""

from __future__ import annotations

from pathlib import Path

# Without a standard of mmcv's own torch's build adds the one that its headers need.
_STANDARD = "extra_compile_args['cxx'] = ['-std=c++17']"
_OPERATORS = Path("mmcv/ops/csrc/pytorch")
# Its macro `max` and its helpers' names, shared with roi_align.cpp, would meet others' in a group.
_ALONE = ("psamask.cpp", "bezier_align.cpp")
# As many groups as keep apart the CPU files that define the same names; a clash does not compile.
_GROUPS = {_OPERATORS: (2, ()), _OPERATORS / "cpu": (3, _ALONE)}


def prepare(source: Path) -> None:
    """Rewrites an unpacked source archive; ends with a message if it is not the known one."""
    setup = source / "setup.py"
    text = setup.read_text(encoding="utf-8")
    if (count := text.count(_STANDARD)) != 1:
        raise SystemExit(f"mmcv: setup.py must hold {_STANDARD} once, got it {count} times")
    setup.write_text(text.replace(_STANDARD, "extra_compile_args['cxx'] = []"), encoding="utf-8")
    for folder, (groups, alone) in _GROUPS.items():
        _group(source / folder, groups, alone)


def _group(folder: Path, groups: int, alone: tuple[str, ...]) -> None:
    files = sorted(folder.glob("*.cpp"))
    missing = set(alone) - {file.name for file in files}
    if missing or len(files) < groups + len(alone):
        expected = ", ".join(alone) or "*.cpp"
        raise SystemExit(f"mmcv: {folder} must hold {expected}, got {len(files)} files")
    renamed = [
        file.rename(file.with_suffix(".inc")).name for file in files if file.name not in alone
    ]
    for index in range(groups):
        lines = [f'#include "{name}"\n' for name in renamed[index::groups]]
        (folder / f"group_{index}.cpp").write_text("".join(lines))
