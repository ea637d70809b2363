"""Test CUTLASS's products on the present device: every hostile case, graphs, programmatic dependents, equal bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from autosel.candidates.cutlass.products import KERNELS, CutlassKernel
from autosel.fingerprint.known import load, names
from autosel.native.compile import compile_source
from autosel.native.load import load_entry
from autosel.ops import OPS, eager
from autosel.ops.contract import Case, Mismatch
from autosel.ops.linear import projection_cases
from autosel.values import DTypeName, Fingerprint, NativeRecipe, Rejected, Workload
from tests.compile.test_emulated_cutlass import WholeVectors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OP = OPS["linear"]
PRODUCTS = [k for k in KERNELS if k.op == "linear"]
# Each kind of build: narrow and wide streaming tiles, split ones, large tiles, Stream-K.
SHAPES = ((16, 4096, 4096), (8, 1024, 4096), (128, 28672, 4096), (4096, 4096, 4096), (640, 2048, 8192))


def device() -> Fingerprint:
    """Return a known device of this compute capability, with the SMs and the shared memory of the present one."""
    here = torch.cuda.get_device_properties(0)
    cc = f"{here.major}.{here.minor}"
    alike = [fp for fp in map(load, names()) if str(fp.identity["cc"]) == cc]
    if not alike:
        pytest.skip(f"no known device has compute capability {cc}")
    own = {"sm_count": here.multi_processor_count, "smem_per_cta_bytes": here.shared_memory_per_block_optin}
    return dataclasses.replace(alike[0], identity={**alike[0].identity, **own})


def built(kernel: CutlassKernel, w: Workload) -> Callable[..., None]:
    """Return the kernel with this workload's knobs, called with the op's arguments and y."""
    fp = device()
    answer = kernel.supports(w, fp)
    if isinstance(answer, Rejected):
        pytest.skip(answer.reason)
    knobs = kernel.knobs(w, fp)
    recipe = kernel.recipe(w, fp, knobs)
    assert isinstance(recipe, NativeRecipe)
    entry = load_entry(compile_source(recipe.source, recipe.flags).digest, recipe.entry)
    settings = [knobs[name] for name in kernel.knob_args]
    return lambda *tensors, pdl=0: entry(*tensors, *settings[:-1], pdl)


def on_device(values: dict[str, Any]) -> dict[str, Any]:
    """Copy tensors to the device with the same layout: strides, overlaps and offsets."""

    def moved(t: torch.Tensor) -> torch.Tensor:
        flat = torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),), (1,), 0).cuda()
        return torch.as_strided(flat, t.shape, t.stride(), t.storage_offset())

    return {k: moved(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def linear(shape: tuple[int, int, int], dtype: DTypeName = "bf16", **traits: Any) -> Workload:
    return OP.workload(dtype, dict(zip("MNK", shape, strict=True)), **traits)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", PRODUCTS, ids=lambda k: k.source)
def test_a_build_meets_the_contract_in_every_case(
    kernel: CutlassKernel, shape: tuple[int, int, int], dtype: DTypeName
) -> None:
    run, wrong = built(kernel, linear(shape, dtype)), []
    for traits in ({}, {"bias": True, "residual": True}):
        small = linear((17, 256, 512), dtype, **traits)
        whole = projection_cases(OP, WholeVectors(small), weights=("w",), width="K")  # type: ignore[arg-type]
        real = linear((min(shape[0], 300), min(shape[1], 1024), shape[2]), dtype, **traits)
        raced = Case(name="raced", workload=real, make=lambda seed, w=real: OP.inputs(w, seed), covers="its own K")
        for number, made in enumerate((*whole, *OP.cases(small), raced)):
            inputs = made.make(11)
            y = torch.full((made.workload["M"], made.workload["N"]), float("nan"), dtype=inputs["x"].dtype).cuda()
            run(*OP.arguments(on_device(inputs)), y, pdl=number % 2)
            found = OP.verify(made.make(11), [y.cpu()], (eager.linear(*OP.arguments(made.make(11))),))
            if isinstance(found, Mismatch):
                wrong.append(f"{made.workload.key} {made.name}: {found.check}: {found.reason}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", PRODUCTS, ids=lambda k: k.source)
def test_calls_and_replays_of_a_graph_give_the_same_bits(kernel: CutlassKernel, shape: tuple[int, int, int]) -> None:
    """Test split tiles too: their sums are added in an order that does not depend on which CTA is last."""
    w = linear(shape)
    run, inputs = built(kernel, w), on_device(OP.inputs(w, 5))
    arguments = OP.arguments(inputs)
    first = torch.empty(w["M"], w["N"], dtype=torch.bfloat16, device="cuda")
    run(*arguments, first)
    again, graph = torch.empty_like(first), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # one after the other on one workspace
            run(*arguments, again)
    for _ in range(20):
        again.fill_(float("nan"))
        graph.replay()
        assert torch.equal(first, again)


@pytest.mark.parametrize("kernel", PRODUCTS, ids=lambda k: k.source)
def test_a_chain_of_dependents_reads_what_the_one_before_has_written(kernel: CutlassKernel) -> None:
    w = linear((16, 4096, 4096))
    run, inputs = built(kernel, w), on_device(OP.inputs(w, 6))
    x, weights = inputs["x"], inputs["w"]
    chained, plain = ([x, *(torch.full_like(x, float("nan")) for _ in range(6))] for _ in range(2))
    for line, pdl in ((chained, 1), (plain, 0)):
        for given, made in pairwise(line):  # no other kernel in between, because it would be waited for
            run(given, weights, None, None, made, pdl=pdl)
            torch.cuda.synchronize() if pdl == 0 else None
    assert torch.equal(chained[-1], plain[-1])
