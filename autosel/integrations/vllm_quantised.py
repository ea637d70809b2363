"""Count the quantised linear layers of a vLLM model by format and by the class that runs them.

    told_layers(model.modules())    # 28, "28 in int4-g128 by CompressedTensorsWNA16"

Importing this does not need vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

PLAIN = "UnquantizedLinearMethod"  # vLLM's class for weights in an ordinary dtype
METHOD = "LinearMethodBase"  # the base of all its classes for linear layers


def told_layers(layers: Iterable[Any]) -> tuple[int, str]:
    """Return the number of quantised linear layers, and that of each format."""
    found = Counter(told_format(layer) for layer in layers if is_quantised(layer))
    return found.total(), ", ".join(f"{count} in {told}" for told, count in sorted(found.items()))


def is_quantised(layer: Any) -> bool:
    """Return True for a linear layer of vLLM whose method is not that for ordinary dtypes."""
    names = [kind.__name__ for kind in type(getattr(layer, "quant_method", None)).__mro__]
    return METHOD in names and PLAIN not in names


def told_format(layer: Any) -> str:
    """Return a layer's format, as far as its method tells it, and the class that runs it."""
    method, scheme = layer.quant_method, getattr(layer, "scheme", None)
    how = scheme if scheme is not None else getattr(method, "quant_config", None)
    bits, group = _first(how, "num_bits", "weight_bits"), getattr(how, "group_size", None)
    name = type(scheme if scheme is not None else method).__name__
    if bits is None:
        return name
    size = "" if group is None else "-row" if group == -1 else f"-g{group}"
    zeros = getattr(how, "symmetric", True) is False or getattr(how, "zero_point", False) is True
    order = getattr(how, "desc_act", False) is True
    return f"int{bits}{size}{' with zero points' * zeros}{' in activation order' * order} by {name}"


def _first(thing: Any, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(thing, name, None), int)), None)
