"""Test decode attention on emulated threads: every hostile case, whole and split, short rings and long ones.

Half of the kernels run each day, in one dtype and at one shape, which change too; --every-target runs all.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from autosel.ops import OPS
from autosel.ops.contract import Case, Inputs, Mismatch
from autosel.ops.stored import tensors
from autosel.values import DTypeName, Workload
from tests import drawn
from tests.compile import cuda_kernels
from tests.compile.cuda_kernels import DTYPES, Battery, Knobs, faults, results_of, workload
from tests.compile.emulate import emulated, one_dtype

KERNELS = {
    source: cuda_kernels.KERNELS[source]
    for source in (
        "attn_decode", "attn_decode_mma", "attn_decode_fp8", "paged_attn_decode", "paged_attn_decode_mma",
    )
}  # fmt: skip


def builds(kernel: str) -> list[tuple[str, DTypeName]]:
    return [(kernel, dtype) for dtype in DTYPES if dtype in KERNELS[kernel].dtypes]


EACH = {kernel: partial(builds, kernel) for kernel in KERNELS}


def batteries(kernel: str) -> list[tuple[str, DTypeName, int]]:
    """Return the choices: a shape of SHAPES, by number, and a dtype."""
    return [(*build, shape) for build in builds(kernel) for shape in range(len(SHAPES[KERNELS[kernel].op]))]


CONTIGUOUS = {kernel: found for kernel, found in EACH.items() if kernel.startswith("attn")}
named = "-".join
CACHE = {"B": 2, "Hq": 8, "Hkv": 2, "S": 1, "D": 128, "L": 512}
# op -> (shape, traits) whose batteries are run
SHAPES: dict[str, list[tuple[dict[str, int], dict[str, Any]]]] = {
    "attn": [(CACHE, {}), ({**CACHE, "S": 3}, {"ragged": True}), ({**CACHE, "S": 2}, {"window": 37, "softcap": 20.0})],
    "paged_attn": [({**CACHE, "page": 16}, {}), ({**CACHE, "S": 3, "page": 24}, {"window": 37, "softcap": 20.0})],
}
# tile, stages, chunk, pdl: one CTA per head; splits of a block, of odd lengths; the shortest and longest rings
CUTS = ((64, 3, 1 << 20, 0), (32, 2, 32, 0), (64, 2, 77, 1), (128, 8, 128, 0), (32, 2, 9, 0))


def run(kernel: str, w: Workload, inputs: Inputs, cut: Knobs) -> Tensor:
    entry = emulated(kernel, kernel, one_dtype(w.dtype))
    (out,) = results_of(entry, w, inputs, cut, KERNELS[kernel].operands)
    return out


def battery(kernel: str, dtype: DTypeName, shape: int) -> Battery:
    op, cuts = OPS[KERNELS[kernel].op], itertools.cycle(CUTS[shape:] + CUTS[:shape])
    dims, traits = SHAPES[op.name][shape]
    for made in op.cases(workload(kernel, dtype, dims, **traits)):
        yield made, next(cuts)


def failure(kernel: str, made: Case, cut: Knobs) -> Mismatch | None:
    entry = emulated(kernel, kernel, one_dtype(made.workload.dtype))
    return cuda_kernels.failure(entry, made, cut, KERNELS[kernel].operands)


@pytest.mark.in_turns(
    {kernel: partial(batteries, kernel) for kernel in KERNELS}, label=lambda choice: named(map(str, choice)), days=8
)
def test_attention_meets_its_contract_in_every_case(choice: tuple[str, DTypeName, int]) -> None:
    kernel, _, _ = choice
    assert faults(battery(*choice), partial(failure, kernel)) == []


@pytest.mark.in_turns(CONTIGUOUS, label=named)
@pytest.mark.parametrize("width", drawn.share([1, 7, 8, 40, 72, 112, 192, 320, 512], days=5))
def test_any_head_width_is_right(width: int, choice: tuple[str, DTypeName]) -> None:
    kernel, dtype = choice
    if kernel.endswith("_mma") and width > 256:
        return  # refused: see the next test
    op = OPS[KERNELS[kernel].op]
    for number, group in enumerate((1, 3, 8, 24)):
        w = workload(kernel, dtype, {**CACHE, "Hq": 2 * group, "D": width, "L": 83})
        inputs = op.inputs(w, 3)
        for cut in drawn.share(CUTS[:3], days=3, shift=number):
            found = op.verify(inputs, [run(kernel, w, inputs, cut)])
            assert not isinstance(found, Mismatch), (group, cut, found)


@pytest.mark.parametrize(
    ("kernel", "width"), [("attn_decode", 1032), ("attn_decode_mma", 257), ("attn_decode_fp8", 2064)]
)
def test_a_width_that_does_not_fit_registers_is_refused(kernel: str, width: int) -> None:
    op = OPS[KERNELS[kernel].op]
    w = workload(kernel, "bf16", {**CACHE, "D": width, "L": 8})
    with pytest.raises(ValueError, match="too wide"):
        run(kernel, w, op.inputs(w, 3), CUTS[0])


@pytest.mark.parametrize("dtype", drawn.share(DTYPES, days=3))
def test_nan_that_causality_or_a_window_hides_stays_hidden(dtype: DTypeName) -> None:
    op = OPS["attn"]
    w = op.workload(dtype, {"B": 1, "Hq": 2, "Hkv": 1, "S": 4, "D": 64, "L": 90}, window=40)
    inputs = op.inputs(w, 3)
    inputs["v"][0, 0, 89] = float("nan")  # only the last query sees it
    inputs["k"][0, 0, 47] = float("nan")  # only the first query still sees it
    for cut in CUTS:
        assert run("attn_decode", w, inputs, cut)[0].isnan().any(-1).tolist() == [[True, False, False, True]] * 2


@pytest.mark.parametrize("kernel", drawn.share(["attn_decode_fp8", "attn_decode", "attn_decode_mma"], days=3))
def test_nan_beyond_the_lengths_does_not_reach_the_result(kernel: str) -> None:
    op = OPS[KERNELS[kernel].op]
    w = workload(kernel, "bf16", {"B": 3, "Hq": 8, "Hkv": 2, "S": 2, "D": 128, "L": 200}, ragged=True)
    inputs = op.inputs(w, 3)
    clean = [run(kernel, w, inputs, cut) for cut in CUTS]
    for b, length in enumerate(inputs["lengths"].tolist()):
        for tensor in (*tensors(inputs["k"])[:1], *tensors(inputs["v"])[:1]):
            tensor[b, :, length:] = float("nan")
    assert all(torch.equal(run(kernel, w, inputs, cut), want) for cut, want in zip(CUTS, clean, strict=True))


@pytest.mark.parametrize("kernel", ["attn_decode", "attn_decode_mma"])
def test_more_tiles_of_query_rows_split_the_keys_into_fewer_parts(kernel: str) -> None:
    """Limit the splits: otherwise a chunk of a prompt would keep outputs of each row for each split, gigabytes."""
    op = OPS["attn"]
    w = op.workload("bf16", {**CACHE, "S": 64, "L": 128})  # 256 rows a KV head, at most 64 to a tile
    inputs = op.inputs(w, 3)
    assert torch.equal(run(kernel, w, inputs, (32, 2, 32, 0)), run(kernel, w, inputs, (32, 2, 1 << 20, 0)))


@pytest.mark.parametrize("kernel", drawn.share(["attn_decode", "attn_decode_mma", "attn_decode_fp8"], days=3))
def test_the_order_in_which_ctas_arrive_does_not_change_a_bit(kernel: str) -> None:
    """Run blocks forwards in one call and backwards in the next."""
    op = OPS[KERNELS[kernel].op]
    w = workload(kernel, "bf16", {**CACHE, "L": 500})
    inputs = op.inputs(w, 3)
    for cut in CUTS:
        assert torch.equal(run(kernel, w, inputs, cut), run(kernel, w, inputs, cut))


@pytest.mark.parametrize("kernel", drawn.share(["paged_attn_decode", "paged_attn_decode_mma"], days=2))
def test_a_page_that_does_not_exist_is_not_read(kernel: str) -> None:
    op = OPS["paged_attn"]
    w = op.workload("bf16", {**CACHE, "B": 1, "L": 64, "page": 16})
    for stray in (-1, 4, 1 << 30):
        inputs = op.inputs(w, 3)
        inputs["block_table"][0, 2] = stray
        assert run(kernel, w, inputs, CUTS[1]).isfinite().all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": lambda x: x[..., :32]}, "differ in size"),
        ({"k": lambda x: x.float()}, "dtypes differ"),
        ({"q": lambda x: x.mT}, "not contiguous"),
        ({"q": lambda x: x[:, :3]}, "multiple of KV heads"),
        ({"max_len": lambda n: n + 1}, "exceeds the cache"),
        ({"lengths": lambda _: torch.ones(1, dtype=torch.int64)}, "int32"),
        ({"lengths": lambda _: torch.ones(2, dtype=torch.int32)}, "int32"),
    ],
)
def test_arguments_of_another_shape_or_dtype_are_refused(change: dict[str, Any], words: str) -> None:
    op = OPS["attn"]
    w = op.workload("bf16", {"B": 1, "Hq": 4, "Hkv": 2, "S": 2, "D": 64, "L": 32})
    inputs = op.inputs(w, 3)
    out = torch.empty(inputs["q"].shape, dtype=torch.bfloat16)
    inputs |= {name: edit(inputs[name]) for name, edit in change.items()}
    if "q" in change:
        out = torch.empty(inputs["q"].shape, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=words):
        emulated("attn_decode", "attn_decode", one_dtype("bf16"))(*op.arguments(inputs), out, *CUTS[0])
