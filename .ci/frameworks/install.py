"""Makes a virtual environment with the real mmengine, mmcv, mmdet and detectron2, for tests.

    .venv/bin/python .ci/frameworks/install.py .venv-frameworks

It lies on top of the environment whose Python runs this: torch, truncdet and pytest are that
one's, and `make test` keeps running without the frameworks.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import mmcv_wheel

HERE = Path(__file__).resolve().parent


def main(target: Path) -> None:
    """Installs everything into `target`, which is emptied first."""
    wheel = mmcv_wheel.get()
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(target)], check=True)
    python = str(target / "bin" / "python")
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    put_on_top_of(site)
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--requirement", str(HERE / "requirements.txt")], check=True)
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    install_detectron2(pip, site)
    subprocess.run([python, "-W", "ignore", str(HERE / "check.py")], check=True)


def put_on_top_of(site: Path) -> None:
    """Lets an environment see the packages of ours; its own come first."""
    lines = [
        f"import site; site.addsitedir({below!r})"  # so that its .pth files count, truncdet's too
        for below in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    ]
    (site / "_below.pth").write_text("\n".join(lines) + "\n")


def install_detectron2(pip: list[str], site: Path) -> None:
    """Installs detectron2's Python code; registries have it as a wheel for Python 3.10 alone."""
    # pip compares tags only where it installs into a folder. What this Python cannot use is taken
    # out: detectron2 does without rotated boxes and deformable convolutions then.
    foreign = ["--only-binary=:all:", "--python-version=3.10", "--implementation=cp"]
    pinned = ["--no-deps", "--require-hashes", "--requirement", str(HERE / "detectron2.txt")]
    subprocess.run([*pip, *foreign, "--platform=any", *pinned, "--target", str(site)], check=True)
    for library in (site / "detectron2").glob("_C.*.so"):
        library.unlink()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("install.py: it must be called with the environment's folder alone")
    main(Path(sys.argv[1]).absolute())
