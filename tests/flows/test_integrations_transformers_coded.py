"""Test autosel.patch on models in codes, loaded by transformers with the real compressed-tensors."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autosel
from autosel import dispatch, models, ops
from autosel.decode import checkpoint
from autosel.decode.checkpoint import write_checkpoint
from autosel.decode.run import Plan
from autosel.decode.weights import load_weights
from autosel.formats import find_weight_format
from autosel.integrations.transformers import coded
from autosel.integrations.transformers.layer_format import told_format
from autosel.ops.stored import tensors
from autosel.ops.weight import Weight, split
from autosel.testing.serving import serve
from tests import drawn, engines

transformers = pytest.importorskip("transformers", reason="needs the `hf` extra")
pytestmark = [
    pytest.mark.skipif(bool(engines.missing()), reason=engines.missing()),
    pytest.mark.usefixtures("compressed_tensors"),
]

D, HEADS, KV_HEADS, HEAD, I, V, LAYERS = 128, 2, 1, 64, 256, 512, 2
PROJECTIONS = 7 * LAYERS
SHAPES = {(HEADS * HEAD, D), (KV_HEADS * HEAD, D), (D, HEADS * HEAD), (I, D), (D, I)}  # N, K
FORMATS = [name for name in checkpoint.FORMATS if not find_weight_format(name).code.startswith("u")]  # symmetric ones
SERVED = "int4-g128", "int8-row"  # with kernels; the other formats differ in their codes alone
Folders = dict[str, Path]  # checkpoints by format
Served = tuple[str, Path]  # a format, and a home


@pytest.fixture(scope="module")
def compressed_tensors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make compressed-tensors importable, without the other packages of the engines."""
    from transformers.utils.import_utils import is_compressed_tensors_available

    site = tmp_path_factory.mktemp("site")
    for pattern in ("compressed_tensors*", "loguru*"):
        for path in (engines.ENGINES / "dependencies").glob(pattern):
            (site / path.name).symlink_to(path)
    sys.path.append(str(site))
    importlib.invalidate_caches()
    is_compressed_tensors_available.cache_clear()
    yield
    sys.path.remove(str(site))
    is_compressed_tensors_available.cache_clear()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return a checkpoint in bf16, as "plain", and in each format."""
    root = tmp_path_factory.mktemp("checkpoints")
    tiny(initializer_range=0.2).to(torch.bfloat16).save_pretrained(root / "plain")
    for name in FORMATS:
        write_checkpoint(root / "plain", name, root / name)
    return {name: root / name for name in ("plain", *FORMATS)}


def tiny(**changes: Any) -> Any:
    """Return a random Llama of two layers."""
    sizes = {
        "hidden_size": D,
        "intermediate_size": I,
        "num_hidden_layers": LAYERS,
        "vocab_size": V,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    torch.manual_seed(5)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes)).eval()


@pytest.fixture(scope="module", params=[drawn.todays(SERVED)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Return a format, and a home in which its kernel serves one and two rows."""
    name: str = request.param
    find = ops.find("linear")
    chosen = [find.workload("fp32", {"M": m, "N": n, "K": k}, weight=name) for m in (1, 2) for n, k in sorted(SHAPES)]
    return name, serve(tmp_path_factory.mktemp("served"), [(w, "cpp:gemv_coded") for w in chosen])


def loaded(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def tokens(model: Any, rows: int = 1) -> list[list[int]]:
    ids = torch.randint(2, V, (rows, 17), generator=torch.Generator().manual_seed(3))
    found: list[list[int]] = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None).tolist()
    return found


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.arange(2, 12)[None]).logits
    return found


def codes_of(module: Any) -> Weight:
    (held,) = coded.held_codes([("", module.forward.__func__)]).values()
    return held.weight


def codes_served(board: dispatch.Board) -> int:
    return sum(use.calls for use in board.uses() if use.candidate == "cpp:gemv_coded")


def test_decided_kernels_serve_the_codes_and_greedy_tokens_are_the_same(folders: Folders, served: Served) -> None:
    name, home = served
    model = loaded(folders[name])
    before = [tokens(loaded(folders[name]), rows) for rows in (1, 2)]
    with dispatch.use(home) as board:
        patched = autosel.patch(model)
        assert patched.replaced["linear"] == PROJECTIONS + 1, patched.left
        assert f"{PROJECTIONS} linear layers as codes ({name}), {PROJECTIONS} of them decided" in str(patched)
        for rows, expected in zip((1, 2), before, strict=True):
            assert tokens(model, rows) == expected
        steps = 2 * 7  # the first token of each is the prompt's, whose 17 rows are not decided
        assert codes_served(board) == PROJECTIONS * (steps + 1)  # and one at the proof
        autosel.unpatch(model)
        assert tokens(model) == before[0] and codes_served(board) == PROJECTIONS * (steps + 1)


@pytest.mark.parametrize("called", [False, True], ids=["packed", "dequantised"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_codes_are_those_of_the_checkpoint(folders: Folders, name: str, called: bool, tmp_path: Path) -> None:
    """Test codes that were taken before and after compressed-tensors has dequantised them."""
    model = loaded(folders[name])
    if called:
        tokens(model)
    with dispatch.use(tmp_path):
        autosel.patch(model)
    weights = load_weights(Plan(model=models.load(folders[name]), weights=str(folders[name]), dtype="fp32"))
    for i, layer in enumerate(model.model.layers):
        ours = [
            coded._HELD[getattr(layer.self_attn, p).forward.__func__].weight for p in ("q_proj", "k_proj", "v_proj")
        ]
        theirs = split(weights[f"{i}.qkv"], [w.shape[0] for w in ours])
        down = coded._HELD[layer.mlp.down_proj.forward.__func__].weight
        for mine, other in zip((*ours, down), (*theirs, weights[f"{i}.down"]), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(tensors(mine), tensors(other), strict=True))


def test_an_unpatched_model_gives_the_original_bits(folders: Folders, tmp_path: Path) -> None:
    model = loaded(folders["int4-g32"])
    theirs = model.model.layers[0].mlp.up_proj.forward
    expected = logits(loaded(folders["int4-g32"]))
    with dispatch.use(tmp_path) as board:
        patched = autosel.patch(model)
        assert f"{PROJECTIONS} linear layers as codes (int4-g32), 0 of them decided for one row" in patched.codes
        assert torch.equal(logits(model), expected), "nothing is decided: the module's own forward runs"
        assert not codes_served(board)
    autosel.unpatch(model)
    assert torch.equal(logits(model), expected)
    assert model.model.layers[0].mlp.up_proj.forward == theirs
    assert not any(name.startswith("_autosel") for module in model.modules() for name in module.__dict__)


def test_a_changed_weight_and_a_copy_of_the_model_run_their_own_code(folders: Folders, served: Served) -> None:
    name, home = served
    model, other = loaded(folders[name]), loaded(folders[name])
    tokens(other)
    with dispatch.use(home) as board, torch.no_grad():
        autosel.patch(model)
        twin, count = copy.deepcopy(model), codes_served(board)
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        other.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        assert tokens(model) == tokens(other)
        assert codes_served(board) == count + (PROJECTIONS - 1) * 7
        count = codes_served(board)
        for changed in (twin, other):
            changed.model.layers[1].self_attn.o_proj.weight.neg_()
        other.model.layers[0].mlp.down_proj.weight.div_(1.5)
        assert tokens(twin) == tokens(other) and codes_served(board) == count


def test_codes_that_do_not_give_the_weight_again_are_not_served(folders: Folders, tmp_path: Path) -> None:
    model = loaded(folders["int8-g128"])
    tokens(model)
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight[7, 9] += 1.0
    with dispatch.use(tmp_path):
        patched = autosel.patch(model)
    assert [left.module for left in patched.left] == ["model.layers.1.mlp.gate_proj"]
    assert "its weight was changed since int8-g128 (compressed-tensors) was loaded" in str(patched)
    assert "no whole decode steps: model.layers.1.mlp.gate_proj is a Linear in int8-g128" in patched.steps


def test_a_model_that_was_dequantised_when_it_was_loaded_is_a_plain_one(folders: Folders, tmp_path: Path) -> None:
    config = transformers.CompressedTensorsConfig(dequantize=True)
    model = loaded(folders["int4-g64"], quantization_config=config)
    with dispatch.use(tmp_path):
        patched = autosel.patch(model)
    assert patched.replaced["linear"] == PROJECTIONS + 1 and not patched.codes
    assert patched.steps.startswith("decode steps run module by module")


def zero_points(layer: Any) -> None:
    layer.quantization_scheme.weights.symmetric = False


def activations(layer: Any) -> None:
    layer.quantization_scheme.input_activations = layer.quantization_scheme.weights


def odd_groups(layer: Any) -> None:
    layer.quantization_scheme.weights.group_size = 48


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (zero_points, "int4-g128 with zero points"),
        (activations, "int4-g128 with quantised activations"),
        (odd_groups, "int4-g48"),
    ],
)
def test_a_scheme_without_a_kernel_is_named(folders: Folders, change: Any, told: str, tmp_path: Path) -> None:
    model = loaded(folders["int4-g128"])
    expected = logits(model)
    layer = model.model.layers[0].mlp.up_proj
    layer.quantization_scheme = copy.deepcopy(layer.quantization_scheme)
    change(layer)
    with dispatch.use(tmp_path):
        patched = autosel.patch(model)
    assert f"Linear in {told} (compressed-tensors)" in str(patched)
    assert f"no whole decode steps: model.layers.0.mlp.up_proj is a Linear in {told} (compressed-tensors)" in str(
        patched
    )
    assert [left.module for left in patched.left] == ["model.layers.0.mlp.up_proj"]
    layer.quantization_scheme.input_activations = None
    assert torch.equal(logits(model), expected)


# --- layers of other packages: only their attributes, which their own code has ----------------------------------------


class TorchLinear(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(16, 128, dtype=torch.int32))
        vars(self).update(attributes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], 128)


class Params4bit(nn.Parameter):
    quant_type = "nf4"


def gptq() -> nn.Module:
    TorchLinear.__module__ = "gptqmodel.nn_modules.qlinear.torch"
    return TorchLinear(bits=4, group_size=128, desc_act=True, sym=True)


def bitsandbytes() -> nn.Module:
    Params4bit.__module__ = "bitsandbytes.nn.modules"
    made = nn.Linear(D, D, bias=False)
    made.weight = Params4bit(torch.zeros(D, D), requires_grad=False)
    return made


def fp8() -> nn.Module:
    made = nn.Linear(D, D, bias=False)
    made.weight = nn.Parameter(made.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    return made


OTHERS = [
    (gptq, "TorchLinear in int4-g128 in activation order (gptqmodel)"),
    (bitsandbytes, "Linear in nf4 (bitsandbytes)"),
    (fp8, "Linear in float8_e4m3fn"),
]


@pytest.mark.parametrize(("layer", "told"), OTHERS)
def test_a_layer_of_another_package_is_named(layer: Any, told: str) -> None:
    made = layer()
    assert f"{type(made).__name__} in {told_format(made)}" == told


def test_a_model_with_such_a_layer_says_so(folders: Folders, tmp_path: Path) -> None:
    model = loaded(folders["plain"])
    model.model.layers[1].self_attn.q_proj = gptq()
    with dispatch.use(tmp_path):
        patched = autosel.patch(model)
    assert f"{OTHERS[0][1]} has no kernel here" in str(patched)
    assert f"no whole decode steps: model.layers.1.self_attn.q_proj is a {OTHERS[0][1]}" in patched.steps
    assert [left.module for left in patched.left] == ["model.layers.1.self_attn.q_proj"]
