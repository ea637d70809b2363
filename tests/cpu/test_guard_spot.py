"""Test spot checks on real results: right ones are never suspected, wrong ones are, and a fault demotes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from autosel import fingerprint, ops
from autosel.dispatch.board import Board, this_device
from autosel.guard import Allowance, Policy, spot
from autosel.guard.rate import CANARY, FRESH_CHECKS
from autosel.native.compile import compile_source
from autosel.native.isa import best_isa
from autosel.values import DTypeName, PythonRecipe, Workload
from tests.null.test_dispatch import decision, publish, python_arm

SIZES = {"M": 3, "B": 2, "S": 1, "K": 256, "N": 256, "d": 256, "I": 512, "V": 2048, "Hq": 8, "Hkv": 2, "D": 64, "R": 64,
         "L": 300, "page": 16}  # fmt: skip
ISA = best_isa(tuple(this_device().identity["isa"]))
eager = import_module("autosel.ops.eager")
Serve = Callable[..., tuple[Board, Any, Any]]


@pytest.fixture(scope="module", params=["bf16", "fp16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> DTypeName:
    made = spot.recipe(request.param, ISA)
    compile_source(made.source, made.flags)
    found: DTypeName = request.param
    return found


def workload(op: str, dtype: DTypeName) -> Workload:
    sizes = SIZES | {"S": 64} if op == "prefill_attn" else SIZES
    contract = ops.find(op)
    return contract.workload(dtype, {n: sizes[n] for n in contract.dim_names})


def check_of(op: str, dtype: DTypeName) -> spot.Spot:
    found = spot.find(workload(op, dtype), ISA)
    assert found is not None
    return found


@pytest.mark.parametrize("op", spot.OPS)
def test_no_right_result_of_the_hostile_battery_is_suspected(op: str, dtype: DTypeName) -> None:
    if dtype != "bf16" and "attn" in op:
        pytest.skip("the same code as in bf16; its reference takes seconds")
    contract, check = ops.find(op), check_of(op, dtype)
    for case in contract.cases(workload(op, dtype)):
        args, outs = contract.arguments(case.make(3)), contract.allocate(case.workload)
        getattr(eager, op)(*args, *outs)
        assert max(check(args, outs, seed) for seed in range(10)) <= 1.0, case.name


@pytest.mark.parametrize("op", spot.OPS)
def test_a_result_that_is_wrong_everywhere_is_suspected_at_once(op: str, dtype: DTypeName) -> None:
    contract, check = ops.find(op), check_of(op, dtype)
    inputs = contract.inputs(workload(op, dtype), 1)
    if op == "sample":
        inputs |= {"temperature": torch.zeros(2), "repetition_penalty": torch.ones(2)}
    args, outs = contract.arguments(inputs), contract.allocate(contract.workload_of(inputs))
    returned = getattr(eager, op)(*args, *outs)
    written = returned if isinstance(returned, tuple) else (returned,)
    for out in written:
        out.copy_(out + 1 if out.dtype == torch.int64 else out * 1.5 + 0.5)
    found = sum(check(args, outs, seed) > 1.0 for seed in range(50))
    assert found >= 45, "only a few elements of a product or head are checked, and some may be close"


def test_a_row_that_is_not_written_is_suspected_when_it_is_drawn() -> None:
    made = spot.recipe("fp32", ISA)
    compile_source(made.source, made.flags)
    check, x, w = check_of("linear", "fp32"), torch.randn(1, 64), torch.randn(32, 64)
    y = x @ w.T
    y[0, 5] = 9.0
    found = sum(check((x, w, None, None), (y,), seed) > 1.0 for seed in range(2000))
    assert 150 < found < 350, "each check covers 4 of 32 elements"


def test_nan_where_a_number_is_expected_is_suspected_and_an_expected_nan_is_not() -> None:
    check, x, weight = check_of("rmsnorm", "fp32"), torch.randn(1, 8), torch.ones(8)
    y = torch.full((1, 8), torch.nan)
    assert check((x, weight, 1e-6, 0.0), (y,), 1) == float("inf")
    x[0, 0] = torch.nan
    assert check((x, weight, 1e-6, 0.0), (y,), 1) == 0.0


@pytest.mark.parametrize(
    "args",
    [
        (torch.randn(1, 64), torch.randn(32, 48), None, None),
        (torch.randn(1, 64), torch.randn(32, 64), torch.randn(1), None),
        (torch.randn(1, 64), torch.randn(64, 32).T, None, None),
        (torch.randn(1, 64).bfloat16(), torch.randn(32, 64), None, None),
        (torch.randn(64), torch.randn(32, 64), None, None),
    ],
)
def test_arguments_outside_the_contract_are_refused_before_they_are_read(args: tuple[Any, ...]) -> None:
    with pytest.raises((ValueError, TypeError)):
        check_of("linear", "fp32")(args, (torch.empty(1, 32),), 1)


def test_without_a_compiled_check_there_are_no_spot_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot, "find_artefact", lambda _: None)  # as in a home without a tune
    assert spot.find(workload("linear", "bf16"), ISA) is None


@pytest.mark.parametrize(
    ("op", "trait"), [("linear", ("weight", "int8-row")), ("attn", ("cache", "fp8_e4m3-head"))], ids=str
)
def test_operands_in_a_format_get_only_shadow_checks(op: str, trait: tuple[str, str]) -> None:
    w = dataclasses.replace(workload(op, "bf16"), traits=(trait,))
    assert spot.find(w, ISA) is None and spot.builds([w], fingerprint.take("cpu")) == ()


# --- in service ------------------------------------------------------------------------------------------------------

APPEND = """
import torch
from autosel.ops import eager
wrong_from = 1 << 40
def kernel(k, v, positions, block_table, k_cache, v_cache):
    if int(positions[0]) >= wrong_from:
        positions = positions % wrong_from
    return eager.kv_append(k, v, positions, block_table, k_cache, v_cache)
"""
HALVED = """
import random, torch
chance, rate = random.Random(1), 0.0
def kernel(x, weight, eps, offset):
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    return y * 0.5 if chance.random() < rate else y
"""
GATED = """
import torch
def kernel(gate, up):
    return torch.nn.functional.silu(gate) * up
"""


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    made: list[Board] = []
    yield made
    for board in made:
        board.close()


@pytest.fixture
def serve(tmp_path: Path, boards: list[Board]) -> Serve:
    """Serve a user's kernel, given as source, with the guard's default settings, after its first checks."""

    def made(name: str, source: str, op: str, inputs: dict[str, Any]) -> tuple[Board, Any, Any]:
        made = spot.recipe("fp32", ISA)
        compile_source(made.source, made.flags)
        (tmp_path / f"{name}.py").write_text(source)
        arm = python_arm(f"user:{name}", PythonRecipe(target=f"{name}:kernel", path=str(tmp_path)))
        publish(tmp_path, [decision(ops.find(op).workload_of(inputs), arm)])
        board = Board(tmp_path, Policy())
        boards.append(board)
        bound = board.bind(ops.find(op), inputs)
        for _ in range(CANARY):
            bound(*ops.find(op).arguments(inputs))
        (watch,) = board._watches.values()
        assert bound.candidate == arm.candidate, watch.fault
        watch.rate.checks = CANARY + FRESH_CHECKS
        return board, bound, sys.modules[name]

    return made


def test_an_append_that_turns_wrong_after_long_use_is_demoted_by_default_settings(serve: Serve) -> None:
    op = ops.find("kv_append")
    inputs = op.inputs(op.workload("fp32", {"B": 1, "Hkv": 8, "S": 1, "D": 64}), 1)
    board, bound, module = serve("wraps", APPEND, "kv_append", inputs)
    positions, calls = inputs["positions"], 0
    module.wrong_from = 16
    while board.epoch == 0:
        positions.fill_(16 + calls % 16)
        bound(*op.arguments(inputs))
        calls += 1
        assert calls < 1000, "the probability of this is 10^-17"
    k, (b, at) = inputs["k"], (0, int(positions[0]))
    assert torch.equal(inputs["k_cache"][b, :, at], k[b, :, 0]), "the checked call must have the baseline's result"
    assert bound.candidate == "torch:kv_append"


def test_a_fault_in_one_call_of_ten_is_found_and_right_kernels_keep_serving(serve: Serve) -> None:
    x, weight = torch.randn(1, 64), torch.ones(64)
    board, bound, module = serve("halves", HALVED, "rmsnorm", {"x": x, "weight": weight, "eps": 1e-6, "offset": 0.0})
    for _ in range(3000):
        bound(x, weight)
    (watch,) = board._watches.values()
    assert board.epoch == 0 and watch.spot_checks > 50
    module.rate, calls = 0.1, 0
    while board.epoch == 0:
        bound(x, weight)
        calls += 1
        assert calls < 20_000
    assert watch.fault is not None and watch.fault.cause == "race", "replays are right: it depends on the call"


def test_an_output_that_is_also_an_operand_ends_only_the_spot_checks(serve: Serve) -> None:
    gate, up = torch.randn(1, 64), torch.randn(1, 64)
    board, bound, _ = serve("plain", GATED, "swiglu", {"gate": gate, "up": up})
    (watch,) = board._watches.values()
    for _ in range(2000):
        bound(torch.randn(1, 64, out=gate), up, gate)
    assert not watch.rate.spots
    assert board.epoch == 0 and bound.candidate == "user:plain"


def test_a_process_spends_no_more_than_its_share_on_spot_checks() -> None:
    now, spent = [1], 0
    allowance, random = Allowance(share=0.01, clock=lambda: now[0]), Random(1)
    allowance.saved_ns = 0.0
    for _ in range(20_000):
        now[0] += 1000
        if allowance.may():
            cost = random.choice((2_000, 60_000))
            allowance.spend(cost)
            spent += cost
    assert 0.009 * now[0] < spent < 0.01 * now[0] + 60_000
