"""Each known cause has its remedy, under every name that a comparison may give it."""

import pytest

from truncdet._remedies import remedy
from truncdet._strict_table import TABLE


@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("ConvolutionBackward0", "cudnn.deterministic"),
        ("CudnnConvolutionBackward0", "cudnn.deterministic"),
        ("aten::convolution_backward", "cudnn.deterministic"),
        ("aten::addmm", "CUBLAS_WORKSPACE_CONFIG"),
        ("AddmmBackward0", "CUBLAS_WORKSPACE_CONFIG"),
        ("aten::_scaled_mm", None),
        ("random state", "truncdet.enable(seed=0)"),
        ("initial parameter", "truncdet.enable(seed=0)"),
        ("NativeDropoutBackward0", "truncdet.enable(seed=0)"),
        ("batch", "sampler"),
        ("c10d::allreduce_", "NCCL"),
        (
            "GeneratedBackwardFor_torchvision_roi_align_defaultBackward",
            "truncdet.enable() or truncdet.roi_align",
        ),
        ("RoIAlignFunctionBackward", "truncdet.enable() or truncdet.roi_align"),
        ("aten::index_add_", "index_add"),
        ("NativeBatchNormBackward0", None),
        ("ReluBackward0", None),
        ("SliceBackward0", None),
    ],
)
def test_known_causes(op: str, text: str | None) -> None:
    found = remedy(op)
    assert found is None if text is None else found is not None and text in found, found


@pytest.mark.parametrize("name", TABLE)
def test_every_operator_of_the_strict_table_has_its_own(name: str) -> None:
    assert remedy(name) is not None
