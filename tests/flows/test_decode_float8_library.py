"""Test checkpoints in e4m3 that compressed-tensors writes: its dequantised weights, and the tokens of transformers.

The library calls floats of 8 bits `float-quantized` with quantised activations, and `naive-quantized` without.
transformers rounds the activations of the former, which autosel does not: tokens are compared for the latter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosel import models
from autosel.decode.generate import generate
from autosel.decode.model import Decoder
from autosel.decode.run import Plan
from autosel.decode.scene import judged
from autosel.decode.weights import Weights, load_weights
from autosel.ops.contract import DTYPE
from autosel.ops.weight import Weight
from autosel.values import DTypeName
from tests import engines
from tests.flows.test_integrations_transformers_coded import compressed_tensors

transformers = pytest.importorskip("transformers", reason="needs the `hf` extra")
pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.skipif(bool(engines.missing()), reason=engines.missing()),
]

__all__ = ["compressed_tensors"]  # a fixture

COUNT, PROMPT = 64, [(7 * i + i * i) % 251 for i in range(17)]
STRATEGIES = {"tensor": "fp8_e4m3-row", "channel": "fp8_e4m3-row", "block": "fp8_e4m3-g128"}


def write(folder: Path, strategy: str, dtype: torch.dtype, *, activations: bool = False) -> dict[str, Tensor]:
    """Write a small model by compressed-tensors; return every matrix of its layers as the library dequantises it.

    Widths are not whole blocks of 128.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = drawn().to(dtype)
    how = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    how |= {"block_structure": [128, 128]} if strategy == "block" else {}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": how, "input_activations": inputs if activations else None}
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            choose_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return {f"{n}.weight": m.weight.detach() for n, m in model.named_modules() if n.endswith("_proj")}


def drawn() -> Any:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=2,
        vocab_size=256,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def choose_scales(module: nn.Linear) -> None:
    """Set the scales to those of the largest weights, by the library's formula."""
    from compressed_tensors.quantization.utils import calculate_qparams

    args, w = module.quantization_scheme.weights, module.weight.detach()
    n, k = w.shape
    whole = nn.functional.pad(w, (0, -k % 128, 0, -n % 128)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    most, least = {
        "tensor": lambda: (w.max().view(1), w.min().view(1)),
        "channel": lambda: (w.amax(1, keepdim=True), w.amin(1, keepdim=True)),
        "block": lambda: (whole.amax((1, 3)), whole.amin((1, 3))),
    }[args.strategy]()
    scales, _ = calculate_qparams(least, most, args)
    assert module.weight_scale.shape == scales.shape
    module.weight_scale.data.copy_(scales)


def loaded(folder: Path, dtype: DTypeName, **changes: Any) -> Weights:
    return load_weights(Plan(model=models.load(folder), weights=str(folder), dtype=dtype, **changes))


def named(found: Weights) -> dict[str, Weight]:
    """Return the matrices of layers by the names of a checkpoint."""
    made = {}
    for i, layer in enumerate(found.layers):
        heads = [6 * 32, 2 * 32, 2 * 32]
        made |= {f"model.layers.{i}.self_attn.{p}_proj": w for p, w in zip("qkv", layer.qkv.split(heads), strict=True)}
        made |= {f"model.layers.{i}.self_attn.o_proj": layer.o}
        made |= {f"model.layers.{i}.mlp.{p}_proj": getattr(layer, p) for p in ("gate", "up", "down")}
    return {f"{name}.weight": w for name, w in made.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("dtype", "activations"), [("fp32", False), ("bf16", True)])
def test_codes_give_the_weights_of_compressed_tensors(
    compressed_tensors: None, tmp_path: Path, strategy: str, dtype: DTypeName, activations: bool
) -> None:
    theirs = write(tmp_path, strategy, DTYPE[dtype], activations=activations)
    told = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert told["format"] == ("float-quantized" if activations else "naive-quantized")
    assert models.load(tmp_path).weight == STRATEGIES[strategy]
    ours = named(loaded(tmp_path, dtype))
    assert ours.keys() == theirs.keys()
    for name, w in ours.items():
        assert torch.equal(w.dequantised(DTYPE[dtype]), theirs[name]), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_greedy_tokens_are_those_of_transformers(compressed_tensors: None, tmp_path: Path, strategy: str) -> None:
    write(tmp_path, strategy, torch.float32)
    made = generate(Decoder(loaded(tmp_path, "fp32")), [PROMPT], COUNT, keep_logits=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None)[0]
        theirs = model(tokens[None, :-1]).logits[0, -COUNT:]
        exact = model.double()(tokens[None, :-1]).logits[0, -COUNT:]
    assert made.tokens == [tokens[len(PROMPT) :].tolist()]
    error, bound = judged(torch.cat(made.logits), theirs, exact, "fp32")
    assert error <= bound
