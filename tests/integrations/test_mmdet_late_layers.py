"""The key `deterministic` where layers are made late: it holds, or the forward says that not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import _mmdet_needed  # noqa: F401
import pytest
import torch
from mmdet.models.roi_heads.roi_extractors import GenericRoIExtractor, SingleRoIExtractor
from test_mmdet_config import Own, differs, gradient, settings
from truncdet.integrations import mmdet as mm
from truncdet.integrations._swap import swap_of

import truncdet
from truncdet.testing import assert_bitwise_equal

WISH = {"deterministic": {"mode": "fixed_point"}}
REPLACED = r"RoI layers must be those that were made deterministic .*, got RoIAlign"
COPIES = [copy.deepcopy, lambda extractor: pickle.loads(pickle.dumps(extractor))]


def rebuild(extractor: Any, options: dict[str, Any]) -> None:
    layer, strides = options["roi_layer"], options["featmap_strides"]
    extractor.roi_layers = extractor.build_roi_layers(layer, strides)


class Mixin:
    """Not an extractor, so nothing wraps its constructor by itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        rebuild(self, options)


class Mixed(Mixin, SingleRoIExtractor):
    pass


class Silent(SingleRoIExtractor):
    """Its subclasses are not announced."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


class Unannounced(Silent):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        rebuild(self, options)


class Assigned(SingleRoIExtractor):
    pass


def _late(self: Any, **options: Any) -> None:
    super(Assigned, self).__init__(**options)
    rebuild(self, options)


Assigned.__init__ = _late  # type: ignore[method-assign]


class BesideOwn(Own):
    """Inherits a constructor whose `deterministic` is another thing."""


def test_layers_of_a_constructor_beside_the_base_are_converted() -> None:
    made = Mixed(**settings(**WISH))
    assert all(swap_of(layer) for layer in made.roi_layers)
    assert not differs(made)
    assert differs(Mixed(**settings()))
    assert BesideOwn("mine", **settings()).meant == "mine"


@pytest.mark.parametrize("cls", [Unannounced, Assigned])
@pytest.mark.parametrize("copied", [lambda extractor: extractor, *COPIES])
def test_layers_made_unseen_are_an_error_in_the_forward(
    cls: Any, copied: Callable[[Any], Any]
) -> None:
    made = copied(cls(**settings(**WISH)))
    with pytest.raises(truncdet.TruncdetError, match=f"{cls.__name__}: {REPLACED}"):
        gradient(made)
    truncdet.convert(made)
    assert not differs(made)
    assert differs(cls(**settings()))


@pytest.mark.parametrize("copied", COPIES)
def test_other_layers_put_in_later_are_an_error(copied: Callable[[Any], Any]) -> None:
    made = copied(SingleRoIExtractor(**settings(**WISH)))
    assert not differs(made)
    made.roi_layers[0] = SingleRoIExtractor(**settings()).roi_layers[0]
    with pytest.raises(truncdet.TruncdetError, match=REPLACED):
        gradient(made)
    made.roi_layers = torch.nn.ModuleList()
    with pytest.raises(truncdet.TruncdetError, match="got none that is"):
        made((torch.zeros(1, 4, 8, 8),), torch.zeros(1, 5))


@pytest.mark.parametrize("layers", [None, "absent", 3])
@pytest.mark.parametrize("cls", [SingleRoIExtractor, GenericRoIExtractor])
def test_an_extractor_without_layers_does_not_stop_convert(cls: Any, layers: Any) -> None:
    bare, whole = cls(**settings()), SingleRoIExtractor(**settings())
    del bare.roi_layers
    if layers != "absent":
        bare.roi_layers = layers
    assert len(truncdet.convert(torch.nn.Sequential(whole, bare))) == 2
    assert not bare._forward_pre_hooks
    assert len(truncdet.convert(torch.nn.Sequential(whole, bare), "off")) == 2


def test_off_takes_the_check_away_and_another_mode_keeps_it() -> None:
    made, plain = (SingleRoIExtractor(**settings(**wish)) for wish in (WISH, {}))
    truncdet.convert(made, "truncate")
    assert not differs(made)
    truncdet.convert(torch.nn.Sequential(made), "off")
    assert not made._forward_pre_hooks
    assert_bitwise_equal(gradient(made), gradient(plain))


def test_the_check_compiles() -> None:
    made = SingleRoIExtractor(**settings(**WISH))
    compiled = torch.compile(made, backend="eager")
    features = (torch.randn(1, 4, 16, 16), torch.randn(1, 4, 8, 8))
    boxes = torch.tensor([[0.0, 1.0, 2.0, 30.0, 40.0]])
    assert_bitwise_equal(compiled(features, boxes), made(features, boxes))
    assert not mm.is_patched()
