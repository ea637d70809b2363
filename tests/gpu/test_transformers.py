"""Test autosel.patch on a model on the GPU: proven there, and served only there, by the decisions for the GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import autosel
from autosel import dispatch, fingerprint, ops
from autosel.guard.rate import CANARY
from autosel.testing.serving import serve
from autosel.values import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
transformers = pytest.importorskip("transformers", reason="needs the `hf` extra")

D, HQ, HKV, HEAD, I, V, LAYERS = 256, 4, 2, 64, 512, 128, 2


def model_on_gpu() -> Any:
    sizes = {"hidden_size": D, "intermediate_size": I, "vocab_size": V, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HQ, "num_key_value_heads": HKV, "head_dim": HEAD}
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=64))
    for parameter in model.parameters():  # logits that differ
        parameter.data.normal_(0.0, 0.1)
    return model.eval().to("cuda")


def of_a_step() -> list[tuple[Workload, str]]:
    """Return the workloads of a decode step of one sequence, with a kernel for each."""
    find, heads = ops.find, {"Hq": HQ, "Hkv": HKV, "D": HEAD}
    chosen = [
        (find("linear").workload("fp32", {"M": 1, "N": n, "K": k}), "cuda:gemv")
        for n, k in ((HQ * HEAD, D), (HKV * HEAD, D), (I, D), (D, I), (V, D))
    ]
    chosen.append((find("rmsnorm").workload("fp32", {"M": 1, "d": D}), "cuda:rmsnorm"))
    chosen.append((find("rope").workload("fp32", {"M": 1, **heads, "R": HEAD}), "cuda:rope"))
    chosen.append((find("swiglu").workload("fp32", {"M": 1, "I": I}), "cuda:swiglu"))
    chosen.append((find("attn").workload("fp32", {"B": 1, **heads, "S": 1, "L": 16}), "triton:attn_decode"))
    return chosen


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serve(tmp_path_factory.mktemp("served"), of_a_step(), fingerprint.take("cuda:0"))


@pytest.fixture
def board(home: Path) -> Iterator[dispatch.Board]:
    with dispatch.use(home) as board:
        yield board


def tokens(model: Any) -> list[list[int]]:
    prompt = torch.randint(2, V, (1, 9), generator=torch.Generator().manual_seed(3)).to(model.device)
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    found: list[list[int]] = out.tolist()
    return found


def natively(board: dispatch.Board) -> dict[str, int]:
    """Return the number of calls that our kernels served, by op."""
    found: dict[str, int] = {}
    for use in board.uses():
        if use.candidate.startswith(("cuda:", "triton:")):
            found[use.op] = found.get(use.op, 0) + use.calls
    return found


def test_everything_is_replaced_and_greedy_tokens_are_the_same(board: dispatch.Board) -> None:
    model = model_on_gpu()
    before = tokens(model)
    patched = autosel.patch(model)
    assert patched.replaced == patched.found and not patched.left
    assert tokens(model) == before
    calls = natively(board)
    assert set(calls) == {"linear", "attn", "rmsnorm", "rope", "swiglu"}, "not all decisions were used"
    twin = copy.deepcopy(model)
    assert tokens(twin) == before
    assert natively(board)["attn"] > calls["attn"], "a copy must be served too"
    autosel.unpatch(model)
    calls = natively(board)
    assert tokens(model) == before
    assert natively(board) == calls, "decisions are still used"


def test_a_model_moved_off_its_gpu_runs_its_own_code(board: dispatch.Board) -> None:
    model = model_on_gpu()
    autosel.patch(model)
    tokens(model)
    before = sum(use.calls for use in board.uses())
    tokens(model.to("cpu"))
    assert sum(use.calls for use in board.uses()) == before


@torch.inference_mode()
def test_a_patched_module_is_captured_in_a_graph(board: dispatch.Board) -> None:
    """Compare the bits of a replay on other contents with a plain call."""
    model = model_on_gpu()
    layer = model.model.layers[0].mlp
    draw = torch.Generator().manual_seed(5)
    first, second = (torch.randn(1, 1, D, generator=draw).to("cuda") for _ in range(2))
    autosel.patch(model)
    for _ in range(CANARY + 1):  # beyond the guard's first checks, which wait for the device and serve the baseline
        layer(first)
    wanted = [layer(x) for x in (first, second)]
    assert not torch.equal(*wanted)
    calls = natively(board)
    held = first.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = layer(held)
    assert natively(board)["linear"] == calls["linear"] + 3, "the capture contains autosel's kernel"
    for x, plain in zip((second, first), reversed(wanted), strict=True):
        held.copy_(x)
        graph.replay()
        assert torch.equal(made, plain)
