"""Test CUTLASS's products as programmatic dependents on the present device.

`./run gpu` proves every build (stage `parity`) and compares replays of a graph with calls (stage `graph`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from autosel.candidates.cutlass.products import KERNELS, CutlassKernel
from autosel.fingerprint.known import load, names
from autosel.native.compile import compile_source
from autosel.native.load import load_entry
from autosel.ops import OPS
from autosel.values import Fingerprint, NativeRecipe, Rejected, Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OP = OPS["linear"]
PRODUCTS = [k for k in KERNELS if k.op == "linear"]


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


@pytest.mark.parametrize("kernel", PRODUCTS, ids=lambda k: k.source)
def test_a_chain_of_dependents_reads_what_the_one_before_has_written(kernel: CutlassKernel) -> None:
    w = OP.workload("bf16", {"M": 16, "N": 4096, "K": 4096})
    run, inputs = built(kernel, w), OP.inputs(w, 6)
    x, weights = inputs["x"].cuda(), inputs["w"].cuda()
    chained, plain = ([x, *(torch.full_like(x, float("nan")) for _ in range(6))] for _ in range(2))
    for line, pdl in ((chained, 1), (plain, 0)):
        for given, made in pairwise(line):  # no other kernel in between, because it would be waited for
            run(given, weights, None, None, made, pdl=pdl)
            torch.cuda.synchronize() if pdl == 0 else None
    assert torch.equal(chained[-1], plain[-1])
