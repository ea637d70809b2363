"""Name the format of a quantised layer, and the package that it belongs to.

told_format(module)    # "int4-g128 with zero points (compressed-tensors)"; "" for a layer in an ordinary dtype
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from autosel.formats import WEIGHT_FORMATS, WeightFormat

COMPRESSED_TENSORS = "compressed_tensors"  # the package
ORDERED = ("group", "dynamic")  # its orders of columns that need the group of each column


def told_format(module: nn.Module) -> str:
    if (scheme := scheme_of(module)) is not None:
        return f"{_of_scheme(scheme)} (compressed-tensors)"
    if "qweight" in {**module._parameters, **module._buffers}:
        return f"{_of_packed(module)} ({package_of(module)})"
    weight: Any = module._parameters.get("weight")
    if not isinstance(module, nn.Linear) or weight is None:
        return ""
    if type(weight) not in (Tensor, nn.Parameter):
        kind = getattr(weight, "quant_type", None)
        return f"{kind if isinstance(kind, str) else type(weight).__name__} ({package_of(weight)})"
    return str(weight.dtype).removeprefix("torch.") if weight.itemsize == 1 else ""


def scheme_of(module: nn.Module) -> Any:
    """Return the QuantizationScheme that compressed-tensors has put on a linear layer; None for another module."""
    scheme = module.__dict__.get("quantization_scheme") if isinstance(module, nn.Linear) else None
    return scheme if package_of(scheme) == COMPRESSED_TENSORS else None


def format_of_scheme(scheme: Any) -> WeightFormat | None:
    """Return the weight format whose codes a layer has; None if kernels have no such format."""
    return WEIGHT_FORMATS.get(_of_scheme(scheme)) if _text(scheme.weights and scheme.weights.type) == "int" else None


def _of_scheme(scheme: Any) -> str:
    how = scheme.weights
    if how is None:
        return "quantised activations"
    sizes = {"group": f"g{how.group_size}", "channel": "row"}
    notes = [" with zero points"] * (not how.symmetric) + [" in activation order"] * (_text(how.actorder) in ORDERED)
    notes += [" with quantised activations"] * bool(scheme.input_activations or scheme.output_activations)
    return f"{_text(how.type)}{how.num_bits}-{sizes.get(_text(how.strategy), _text(how.strategy))}{''.join(notes)}"


def _of_packed(module: nn.Module) -> str:
    """Return the format of a layer of GPTQ or AWQ, by the attributes that their packages have in common."""
    bits = getattr(module, "bits", getattr(module, "w_bit", None))
    group = getattr(module, "group_size", None)
    notes = [" with zero points"] * (getattr(module, "sym", None) is False)
    notes += [" in activation order"] * (getattr(module, "desc_act", False) is True)
    size = "" if group is None else "-row" if group == -1 else f"-g{group}"
    return f"int{bits}{size}{''.join(notes)}" if bits else "packed codes"


def package_of(thing: Any) -> str:
    """Return the package of a thing's class."""
    return type(thing).__module__.partition(".")[0]


def _text(value: Any) -> str:
    """Return the text of a member of an enumeration."""
    return str(getattr(value, "value", value))
