"""The frameworks import, and mmcv's RoIAlign computes what torchvision's does."""

import detectron2
import mmcv
import mmdet
import mmengine
import torch
import torchvision
from detectron2.modeling import build_model  # noqa: F401  its imports are most of detectron2
from mmcv.ops import RoIAlign
from mmdet.apis import init_detector  # noqa: F401

features = torch.randn(2, 4, 16, 16)
rois = torch.tensor([[0, 1.0, 2, 40, 50], [1, 5.0, 5, 60, 30]])
gradients = []
for layer in (RoIAlign(7, 0.25, 2), torchvision.ops.RoIAlign(7, 0.25, 2, aligned=True)):
    leaf = features.clone().requires_grad_()
    layer(leaf, rois).square().sum().backward()
    gradients.append(leaf.grad)
torch.testing.assert_close(*gradients)

modules = (torch, torchvision, mmengine, mmcv, mmdet, detectron2)
print(*(f"{module.__name__} {module.__version__}" for module in modules), sep=", ")
