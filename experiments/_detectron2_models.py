"""detectron2's models from its shipped configs, randomly initialised, and a batch for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from _mask_rcnn import SEED, SIZES, make_batch
from detectron2 import model_zoo
from detectron2.config import get_cfg
from detectron2.modeling import build_model
from detectron2.structures import BitMasks, Boxes, Instances
from detectron2.utils.events import EventStorage
from torch import Tensor, nn
from truncdet.integrations.detectron2 import patched

CHANGES = "MODEL.WEIGHTS='', RESNETS.NORM='BN', BACKBONE.FREEZE_AT=0"


def build(config: str, size: str, mode: str) -> nn.Module:
    """The model of a config file, on the CPU, with equal weights in every call and mode."""
    cfg = get_cfg()
    cfg.merge_from_file(model_zoo.get_config_file(config))
    cfg.MODEL.WEIGHTS = ""
    cfg.MODEL.DEVICE = "cpu"
    # The frozen statistics are those of the weights that are not loaded: random features double in
    # every block, and the first losses are in the hundreds.
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    if size == "tiny":
        shrink(cfg)
    torch.manual_seed(SEED)
    made: nn.Module = build_model(cfg).train()
    return made


def batch_of(model: Any, size: str, device: torch.device) -> list[dict[str, Any]]:
    """The synthetic batch as detectron2's data loader would hand it over."""
    images, targets = make_batch(size, device)
    height, width = SIZES[size].height, SIZES[size].width
    batch = []
    for image, target in zip(images, targets, strict=True):
        found = Instances((height, width))
        found.gt_boxes = Boxes(target["boxes"])
        found.gt_classes = target["labels"] % classes_of(model)
        found.gt_masks = BitMasks(target["masks"])
        entry = {"image": (255 * image).byte(), "instances": found}
        batch.append({**entry, "height": height, "width": width})
    return batch


def classes_of(model: Any) -> int:
    """The number of classes; labels count from 0."""
    return int(model.roi_heads.num_classes)


def losses_of(model: nn.Module, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """One forward pass; the losses by name."""
    with EventStorage():  # the heads log into it
        losses: dict[str, Tensor] = model(batch)
    return losses


@contextlib.contextmanager
def scope(mode: str) -> Iterator[None]:
    """detectron2 patched while the model trains."""
    with patched(mode) if mode != "off" else contextlib.nullcontext():
        yield


def shrink(cfg: Any) -> None:
    """A model that takes a second a step on one core."""
    cfg.MODEL.RESNETS.DEPTH = 18
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 64
    cfg.MODEL.RPN.PRE_NMS_TOPK_TRAIN = 100
    cfg.MODEL.RPN.POST_NMS_TOPK_TRAIN = 50
    cfg.MODEL.RPN.PRE_NMS_TOPK_TEST = 100
    cfg.MODEL.RPN.POST_NMS_TOPK_TEST = 50
    cfg.TEST.DETECTIONS_PER_IMAGE = 20
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 32
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = SIZES["tiny"].classes
    cfg.MODEL.ROI_BOX_HEAD.FC_DIM = 64
