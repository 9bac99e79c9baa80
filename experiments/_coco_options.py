"""The command line of coco_map.py, with defaults that fit framework, model and size."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from _coco_data import CocoData, Split, check_data, find_data
from _coco_spec import FRAMEWORKS, MODELS, MODES, Spec

from truncdet._frameworks import installed

NEEDED = {
    "torchvision": (),
    "mmdet": ("mmcv", "mmengine", "mmdet"),
    "detectron2": ("detectron2",),
}
# On an H200 a step takes about 90 to 140 ms; six runs are to take minutes.
STEPS = {
    ("torchvision", "faster_rcnn"): 450,
    ("torchvision", "mask_rcnn"): 300,
    ("mmdet", "faster_rcnn"): 300,
    ("mmdet", "mask_rcnn"): 250,
    ("detectron2", "faster_rcnn"): 300,
    ("detectron2", "mask_rcnn"): 250,
}
DATA = {
    ("full", "faster_rcnn"): "bccd",
    ("full", "mask_rcnn"): "nuclei",
    ("tiny", "faster_rcnn"): "bccd_tiny",
    ("tiny", "mask_rcnn"): "nuclei_tiny",
}
# As large as the files of bccd; twice those of nuclei, whose objects are small.
IMAGE_SIZE = {"bccd": 480, "nuclei": 512}
# Which modes a study has if none are given.
STUDIES = {"map": MODES, "evaluate": ("off", "fixed_point"), "resume": ("fixed_point",)}


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line, checked; `spec` is the first run of all, from which the others differ."""

    study: str
    spec: Spec
    modes: tuple[str, ...]
    seeds: tuple[int, ...]
    repeats: tuple[int, ...]  # for each seed
    jobs: int
    timing_steps: int
    budget: float | None
    resume: bool
    out: Path | None
    work: Path | None

    @property
    def name(self) -> str:
        """Of the result file, without its ending."""
        parts = [f"coco_{self.study}", self.spec.framework, self.spec.model]
        return "_".join(parts if self.spec.amp == "float32" else [*parts, self.spec.amp])


def parse(arguments: Sequence[str], description: str) -> Options:
    """Ends the program with a sentence if something cannot be used."""
    parser = _parser(description)
    given = parser.parse_args(arguments)
    model, tiny = given.model, given.size == "tiny"
    study = "evaluate" if given.only_evaluate else "resume" if given.stop_and_resume else "map"
    try:
        modes = STUDIES[study] if given.modes is None else _list(given.modes)
        _check_modes(modes)
        seeds = tuple(_whole(text, "--seeds", 0) for text in _list(given.seeds))
        if max(seeds) >= 2**32:  # NumPy's limit
            raise ValueError(f"--seeds must be below 2^32, got {max(seeds)}")
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"--seeds must differ, got {given.seeds}")
        repeats = _repeats(given.repeats, len(seeds))
        amp = "float32" if given.amp == "none" else given.amp
        if given.framework != "torchvision" and (amp != "float32" or study != "map"):
            raise ValueError(
                "--framework must be torchvision for --amp, --only-evaluate and --stop-and-resume, "
                f"got {given.framework}"
            )
        data = _data(given, DATA[given.size, model])
        check_data(data, model == "mask_rcnn")
        missing = [name for name in NEEDED[given.framework] if not installed(name)]
        if missing:
            raise ValueError(
                f"--framework: {', '.join(missing)} must be installed for {given.framework}, found "
                "nothing; `make frameworks` makes .venv-frameworks, which has all of them"
            )
        steps = given.steps or (4 if tiny else STEPS[given.framework, model])
        if steps < 2:
            raise ValueError(f"--steps must be at least 2, got {steps}")
        for name, folder in (("--out", given.out), ("--work", given.work)):
            if folder is not None and folder.exists() and not folder.is_dir():
                raise ValueError(f"{name} must be a folder, got the file {folder.name!r}")
    except ValueError as error:
        parser.error(str(error))
    spec = Spec(
        framework=given.framework,
        model=model,
        size=given.size,
        device=given.device,
        mode=modes[0],
        seed=seeds[0],
        repeat=0,
        steps=steps,
        batch=given.batch or (2 if tiny else 8),
        learning_rate=(0.005 if tiny else 0.02) if given.lr is None else given.lr,
        image_size=given.image_size or (96 if tiny else IMAGE_SIZE.get(data.name, 800)),
        amp=amp,
        data=data,
        checkpoint_every=given.checkpoint_every,
    )
    return Options(
        study=study,
        spec=spec,
        modes=modes,
        seeds=seeds,
        repeats=repeats,
        jobs=given.jobs,
        timing_steps=given.timing_steps,
        budget=given.budget,
        resume=given.resume,
        out=given.out,
        work=given.work,
    )


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--framework", choices=FRAMEWORKS, default="torchvision")
    add("--model", choices=MODELS, default="faster_rcnn")
    add("--modes", help=f"of {','.join(MODES)}; default by study")
    add("--seeds", default="0", help="separated by commas")
    add("--repeats", default="2", help="runs of each seed; or one number for each of --seeds")
    add("--steps", type=_count, help="of each run; default by framework and model")
    add("--batch", type=_count, help="images of a step (8; tiny: 2)")
    add("--lr", type=_positive, help="learning rate after the warm-up (0.02; tiny: 0.005)")
    add("--image-size", type=_image_size, help="shorter side that images are resized to")
    add("--data", help="bccd, nuclei, bccd_tiny, nuclei_tiny, or a folder in COCO's layout")
    for part in ("train", "val"):
        add(f"--{part}-json", type=Path, help="instead of --data: the annotation file")
        add(f"--{part}-images", type=Path, help="and the folder of its images")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--size", choices=("full", "tiny"), default="full", help="tiny: a small model, few steps")
    add("--amp", choices=("none", "float16", "bfloat16"), default="none", help="torchvision only")
    add("--jobs", type=_count, default=1, help="runs at once; step times are then taken apart")
    add("--timing-steps", type=_count, default=60, help="of the runs that are timed apart")
    add(
        "--checkpoint-every",
        type=_count_or_none,
        default=150,
        help="steps; torchvision only, 0 for never",
    )
    add("--budget", type=_positive, help="seconds; cuts --steps to fit")
    add("--resume", action="store_true", help="keep the finished runs of an interrupted command")
    add("--out", type=Path, help="folder of the result file and the picture")
    add("--work", type=Path, help="folder of runs and checkpoints (in --out)")
    study = parser.add_mutually_exclusive_group()
    add = study.add_argument
    add("--only-evaluate", action="store_true", help="is evaluation alone repeatable, with ties?")
    add(
        "--stop-and-resume", action="store_true", help="does a stopped run end as one that was not?"
    )
    return parser


def _count(text: str) -> int:
    return _argument(text, 1)


def _count_or_none(text: str) -> int:
    return _argument(text, 0)


def _image_size(text: str) -> int:
    # Above this a batch of the smallest model fits into no memory.
    return _argument(text, 16, 1 << 14)


def _argument(text: str, least: int, most: int = 1 << 31) -> int:
    """What argparse gives on as it is said; of a ValueError it would keep nothing."""
    try:
        found = _whole(text, "it", least)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found > most:
        raise argparse.ArgumentTypeError(f"it must be at most {most}, got {text!r}")
    return found


def _positive(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"it must be a number above 0, got {text!r}")
    return found


def _whole(text: str, name: str, least: int) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        raise ValueError(f"{name} must be a whole number from {least} on, got {text!r}")
    return int(text)


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _check_modes(modes: tuple[str, ...]) -> None:
    if set(modes) - set(MODES) or len(set(modes)) < len(modes):
        raise ValueError(f"--modes must be different ones of {', '.join(MODES)}, got {modes}")


def _repeats(text: str, seeds: int) -> tuple[int, ...]:
    found = tuple(_whole(part, "--repeats", 1) for part in _list(text))
    if len(found) not in (1, seeds):
        raise ValueError(f"--repeats must be one number, or one for each of {seeds}, got {text}")
    return found * seeds if len(found) == 1 else found


def _data(given: argparse.Namespace, default: str) -> CocoData:
    files = [given.train_json, given.train_images, given.val_json, given.val_images]
    if not any(files):
        return find_data(given.data or default)
    if not all(files) or given.data:
        raise ValueError(
            "--train-json, --train-images, --val-json and --val-images must be given together and "
            "without --data"
        )
    train_json, train_images, val_json, val_images = (path.resolve() for path in files)
    name = train_json.stem
    return CocoData(name, Split(train_json, train_images), Split(val_json, val_images))
