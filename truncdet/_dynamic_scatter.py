"""dynamic_scatter: points that share voxel coordinates become one row, by sum, mean or maximum.

Sum and mean are scatter_add's and scatter_reduce's; the maximum and its argmax are those of
truncdet._segment_max, so the gradient goes to the lowest of equal points.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from truncdet import _scatter_shapes as shapes
from truncdet import _sticky
from truncdet import fixedpoint as fp
from truncdet._segment_max import segment_max


def dynamic_scatter(
    feats: Tensor, coors: Tensor, reduce_type: str = "max"
) -> tuple[Tensor, Tensor]:
    """Reduces the points of every voxel to one row; bits repeat in any order of the points.

    As `mmcv.ops.dynamic_scatter`: tiers T1, T2 and T3o (the argmax of equal points, which gets the
    gradient, is the lowest index and so follows their order). A GPU is waited for, since the number
    of voxels depends on the coordinates.

    Example:
        >>> feats = torch.tensor([[1.0], [3.0], [5.0]])
        >>> coors = torch.tensor([[0, 0, 1], [0, 0, 0], [0, 0, 1]])
        >>> truncdet.dynamic_scatter(feats, coors, "sum")
        (tensor([[3.],
                [6.]]), tensor([[0, 0, 0],
                [0, 0, 1]]))

    Args:
        feats: [N, C] features of points; float64, float32, float16 or bfloat16.
        coors: [N, D] integer voxel coordinates; a point with a negative one takes part in nothing.
        reduce_type: 'max', 'sum' or 'mean'.

    Returns:
        Features [M, C] and coordinates [M, D] of the voxels in ascending order of coordinates. The
        bounds are `scatter_reduce`'s. A voxel whose points are all NaN has the maximum -inf.

    Raises:
        TypeError: a dtype is not one of the above.
        ValueError: a shape, a device or reduce_type does not fit.
    """
    _sticky.raise_pending()
    shapes.check_float("dynamic_scatter", "feats", feats)
    shapes.check_integers("dynamic_scatter", "coors", coors)
    shapes.check_device("dynamic_scatter", "feats", feats, "coors", coors)
    if reduce_type not in ("max", "sum", "mean"):
        raise ValueError(
            f"dynamic_scatter: reduce_type must be 'max', 'sum' or 'mean', got {reduce_type!r}"
        )
    for name, x in (("feats", feats), ("coors", coors)):
        if x.dim() != 2 or x.size(0) != feats.size(0):
            raise ValueError(
                f"dynamic_scatter: {name} must have shape [N, n] with feats' N, got {list(x.shape)}"
            )
    if feats.size(0) == 0:
        return feats.clone(), coors.clone()
    # Every dropped point gets the same coordinates, which are sorted to the front.
    valid = coors.masked_fill((coors < 0).any(-1, keepdim=True), -1)
    voxels, index, counts = torch.unique(valid, dim=0, return_inverse=True, return_counts=True)
    dropped = int(coors.size(1) > 0 and voxels[0, 0] < 0)
    voxels, index, counts = voxels[dropped:], index - dropped, counts[dropped:]
    if reduce_type == "max":
        largest, _ = segment_max(feats, index, voxels.size(0))
        return largest, voxels
    mean = reduce_type == "mean"
    kind = fp.compute_dtype(feats.dtype) if mean else feats.dtype
    start = feats.new_zeros(voxels.size(0), feats.size(1), dtype=kind)
    sums = torch.ops.truncdet.index_add(start, 0, index, feats, False, 0)
    return torch.ops.truncdet._divide(sums, counts, feats.dtype) if mean else sums, voxels


class DynamicScatter(nn.Module):
    """`dynamic_scatter` for a voxel encoder, with mmcv's constructor.

    Example:
        >>> scatter = truncdet.DynamicScatter([0.1, 0.1, 0.1], [0, 0, 0, 1, 1, 1], True)
        >>> scatter(torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 4, 4, 4], [0, 4, 4, 4]]))
        (tensor([[1.5000]]), tensor([[0, 4, 4, 4]]))

    Args:
        voxel_size: size of a voxel, [x, y, z].
        point_cloud_range: [x_min, y_min, z_min, x_max, y_max, z_max]; neither is used here.
        average_points: whether to take means instead of maxima.
    """

    def __init__(
        self,
        voxel_size: Sequence[float],
        point_cloud_range: Sequence[float],
        average_points: bool,
    ) -> None:
        super().__init__()
        self.voxel_size = voxel_size
        self.point_cloud_range = point_cloud_range
        self.average_points = average_points

    def forward_single(self, points: Tensor, coors: Tensor) -> tuple[Tensor, Tensor]:
        """The points of one sample; coors [N, 3]."""
        return dynamic_scatter(points, coors, "mean" if self.average_points else "max")

    def forward(self, points: Tensor, coors: Tensor) -> tuple[Tensor, Tensor]:
        """Points [N, C] with coordinates [N, 3], or [N, 4] with the sample's index first.

        Samples are reduced one by one: what else is in the batch changes no bit (T3c).
        """
        if coors.size(-1) == 3 or coors.size(0) == 0:
            return self.forward_single(points, coors)
        features, all_places = [], []
        for sample in range(int(coors[-1, 0]) + 1):
            inside = coors[:, 0] == sample
            voxels, places = self.forward_single(points[inside], coors[inside][:, 1:])
            features.append(voxels)
            all_places.append(nn.functional.pad(places, (1, 0), value=sample))
        return torch.cat(features), torch.cat(all_places)

    def extra_repr(self) -> str:
        return (
            f"voxel_size={self.voxel_size}, point_cloud_range={self.point_cloud_range}, "
            f"average_points={self.average_points}"
        )
