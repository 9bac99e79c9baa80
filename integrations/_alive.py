"""How many layers `convert` has converted that are still there, for the status table."""

from __future__ import annotations

from collections import Counter
from weakref import WeakValueDictionary

from torch import nn
from truncdet.integrations._swap import swap_of

# By identity, since a layer's class may define equality; weakly, since models come and go.
_converted: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def remember(layer: nn.Module) -> None:
    """Notes a layer that was converted or put back; `converted_notes` looks at what it is then."""
    _converted[id(layer)] = layer


def converted_notes() -> tuple[str, ...]:
    """Returns a sentence for every mode that layers are converted to; copies do not count."""
    swaps = [swap_of(layer) for layer in list(_converted.values())]
    count = Counter(swap.recipe.mode for swap in swaps if swap is not None)
    return tuple(
        f"truncdet.convert has converted {number} layer{'s' if number > 1 else ''} in this process "
        f"(mode {mode}); the table shows patches"
        for mode, number in sorted(count.items())
    )
