"""Test the scripts of `export --repro` with operands of every type: they name types like DLPack, and kernels agree."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import pytest
import torch

from autosel import ops
from autosel.candidates import arms, registry
from autosel.cli.repro import script
from autosel.dispatch.board import this_device
from autosel.ledger.key import current_mode
from autosel.ledger.reader import Evidence
from autosel.ops.compare import Match
from autosel.values import Arm, Decision, Knobs, Race

LINEAR = ops.find("linear")
DIMS = {"M": 2, "N": 35, "K": 512}
TYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32,
    torch.int64,
)  # fmt: skip


@cache
def names_of(format_: str) -> dict[str, Any]:
    """Return the names of a script without its race; its kernel is the one for codes in a format."""
    fp, w, coded = this_device(), LINEAR.workload("bf16", DIMS), LINEAR.workload("bf16", DIMS, weight=format_)
    kernel = registry.find("linear", "cpp:gemv_coded")
    knobs = kernel.knobs(coded, fp)
    recipe = kernel.recipe(coded, fp, knobs)
    arm = Arm(candidate=kernel.name, backend="CPP", recipe=recipe, knobs=knobs.values, digest="0" * 64)
    baseline = arms.arm(registry.baseline("linear"), w, fp, "", Knobs())
    decision = Decision(
        id=1, state="promoted", hw_id=fp.hw_id, op="linear", bucket=w.bucket, mode=current_mode(), workload=w, arm=arm,
        baseline=baseline, verdict=None, reason="for the test", created_at="2026-11-26T00:00:00Z",
    )  # fmt: skip
    race = Race(
        workload=w, baseline=baseline.candidate, incumbent=baseline.candidate, finalist=None, delta=0.05,
        alpha_session=0.05, pi=0.01, sessions=(),
    )  # fmt: skip
    evidence = Evidence(decision=decision, fingerprint=None, race=race, parities=(), previous=None, serves=True)
    text, _, after = script(evidence).rpartition("\nmain()\n")
    assert text and not after
    found: dict[str, Any] = {}
    exec(compile(text, "race.py", "exec"), found)
    return found


def dlpack_type(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the code and the bits of a tensor's type: bytes 20 and 21 of a DLTensor."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsule = tensor.__dlpack__()
    code, bits = ctypes.string_at(pointer_of(capsule, b"dltensor") + 20, 2)
    return code, bits


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_script_names_types_like_dlpack(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 4, dtype=dtype)
    view = names_of("q6_k")["view"](tensor)
    assert (view.code, view.bits) == dlpack_type(tensor)
    assert (list(view.shape[:2]), list(view.stride[:2]), view.data) == ([3, 4], [4, 1], tensor.data_ptr())


@pytest.mark.parametrize("format_", ["q6_k", "int8-row", "fp8_e4m3-row"])
def test_a_kernel_of_a_script_reads_codes_of_every_type(format_: str) -> None:
    """Build and call the kernel as the script does: codes are uint8, int8 or float8, and scales uint8 or fp32."""
    names, inputs = names_of(format_), LINEAR.inputs(LINEAR.workload("bf16", DIMS, weight=format_), 1)
    w, y = inputs["w"], torch.full((DIMS["M"], DIMS["N"]), float("nan"), dtype=torch.bfloat16)
    names["build"](names["FACTS"]["arm"])(inputs["x"], w.codes, w.scales, None, None, y)()
    assert isinstance(LINEAR.verify(inputs, (y,)), Match)
