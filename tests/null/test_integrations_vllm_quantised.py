"""Test the line about quantised layers that vLLM runs itself, on stand-ins with the attributes of vLLM's classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autosel.integrations.vllm_quantised import told_layers


class LinearMethodBase: ...


class UnquantizedLinearMethod(LinearMethodBase): ...


class Method(LinearMethodBase):
    def __init__(self, **config: Any) -> None:
        self.quant_config = SimpleNamespace(**config)


class CompressedTensorsLinearMethod(LinearMethodBase): ...


class AutoAWQMarlinLinearMethod(Method): ...


class AutoGPTQLinearMethod(Method): ...


class TorchAOLinearMethod(Method): ...


class CompressedTensorsWNA16(SimpleNamespace): ...


def compressed(**scheme: Any) -> Any:
    return SimpleNamespace(quant_method=CompressedTensorsLinearMethod(), scheme=CompressedTensorsWNA16(**scheme))


def by(method: Any) -> Any:
    return SimpleNamespace(quant_method=method)


AWQ = by(AutoAWQMarlinLinearMethod(weight_bits=4, group_size=128, zero_point=True))
GPTQ = by(AutoGPTQLinearMethod(weight_bits=8, group_size=-1, desc_act=True))
LAYERS = [
    (compressed(num_bits=4, group_size=32, symmetric=True), "int4-g32 by CompressedTensorsWNA16"),
    (compressed(num_bits=4, group_size=-1, symmetric=False), "int4-row with zero points by CompressedTensorsWNA16"),
    (AWQ, "int4-g128 with zero points by AutoAWQMarlinLinearMethod"),
    (GPTQ, "int8-row in activation order by AutoGPTQLinearMethod"),
    (by(TorchAOLinearMethod(torchao_config=None)), "TorchAOLinearMethod"),
]


@pytest.mark.parametrize(("layer", "told"), LAYERS)
def test_a_layer_is_named_by_format_and_class(layer: Any, told: str) -> None:
    assert told_layers([layer]) == (1, f"1 in {told}")


def test_layers_are_counted_by_format_without_plain_ones() -> None:
    layers = [AWQ, AWQ, by(UnquantizedLinearMethod()), SimpleNamespace(), by(object())]
    assert told_layers(layers) == (2, f"2 in {LAYERS[2][1]}")
    assert told_layers([]) == (0, "")
