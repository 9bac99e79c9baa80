"""mmdet's models from its shipped configs, randomly initialised, and a batch for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mmdet
import torch
import truncdet.integrations.mmdet  # noqa: F401  (registers the key `deterministic`)
from _mask_rcnn import SEED, SIZES, make_batch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData
from torch import Tensor, nn

CONFIGS = Path(mmdet.__file__).parent / ".mim" / "configs"
CHANGES = "backbone.init_cfg=None"


def build(config: str, size: str, mode: str) -> nn.Module:
    """The model of a config file, on the CPU, with equal weights in every call.

    The mode reaches it as a user would set it: by the key `deterministic` of its RoI extractors.
    """
    init_default_scope("mmdet")
    described = Config.fromfile(CONFIGS / config).model
    described.backbone.init_cfg = None
    if size == "tiny":
        shrink(described)
    if mode != "off":
        for key in ("bbox_roi_extractor", "mask_roi_extractor"):
            if key in described.roi_head:
                described.roi_head[key].deterministic = {"mode": mode}
    torch.manual_seed(SEED)
    MMLogger.get_current_instance().setLevel("WARNING")  # else a line for every parameter
    model = MODELS.build(described)
    model.init_weights()
    made: nn.Module = model.train()
    return made


def batch_of(model: Any, size: str, device: torch.device) -> dict[str, Any]:
    """The synthetic batch as mmdet's data loader would hand it over; masks where they are used."""
    images, targets = make_batch(size, device)
    height, width = SIZES[size].height, SIZES[size].width
    samples = []
    for target in targets:
        found = InstanceData(bboxes=target["boxes"], labels=target["labels"] % classes_of(model))
        if model.with_mask:
            found.masks = BitmapMasks(target["masks"].cpu().numpy(), height, width)
        shape = {"img_shape": (height, width), "ori_shape": (height, width)}
        sample = DetDataSample(metainfo={**shape, "scale_factor": (1.0, 1.0)})
        sample.gt_instances = found
        samples.append(sample)
    return {"inputs": [(255 * image).byte() for image in images], "data_samples": samples}


def classes_of(model: Any) -> int:
    """The number of classes; labels count from 0."""
    head = model.roi_head.bbox_head
    return int((head[0] if isinstance(head, nn.ModuleList) else head).num_classes)


def losses_of(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """One forward pass; what mmdet adds up to its loss, by name."""
    losses = model(**model.data_preprocessor(batch, True), mode="loss")
    _, named = model.parse_losses(losses)
    # As parse_losses itself tells losses from accuracies; `loss` is their sum.
    return {name: value for name, value in named.items() if "loss" in name and name != "loss"}


@contextlib.contextmanager
def scope(mode: str) -> Iterator[None]:
    """Nothing: the model itself carries the mode."""
    yield


def shrink(described: Any) -> None:
    """A model that takes a second a step on one core."""
    described.backbone.depth = 18
    described.neck.in_channels = [64, 128, 256, 512]
    described.train_cfg.rpn_proposal.update(nms_pre=100, max_per_img=50)
    described.test_cfg.rpn.update(nms_pre=100, max_per_img=50)
    described.test_cfg.rcnn.max_per_img = 20
    stages = described.train_cfg.rcnn
    for stage in stages if isinstance(stages, list) else [stages]:
        stage.sampler.num = 32
    heads = described.roi_head.bbox_head
    for head in heads if isinstance(heads, list) else [heads]:
        head.update(fc_out_channels=64, num_classes=SIZES["tiny"].classes)
    if "mask_head" in described.roi_head:
        described.roi_head.mask_head.num_classes = SIZES["tiny"].classes
