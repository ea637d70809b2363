"""Test weights in a format with real workers, a real race and a real ledger: proven, timed and served by parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from autosel import dispatch, fingerprint, ops
from autosel.candidates import arms, registry
from autosel.candidates.base import support_of
from autosel.candidates.user import from_target
from autosel.formats import WEIGHT_FORMATS
from autosel.ledger import open_ledger
from autosel.ledger.commands import Record
from autosel.ledger.key import current_mode
from autosel.ops import eager_stored
from autosel.ops.contract import Match
from autosel.ops.weight import Weight
from autosel.parity.check import check
from autosel.parity.session import Proof, built
from autosel.race.bench import Bench
from autosel.race.contest import Entrant, SharedOperands
from autosel.values import Accepted, Failed, Knobs, Passed, PythonRecipe, Rejected, Workload
from autosel.workers.pages import LARGE_PAGE_BYTES, Reused
from tests import drawn
from tests.cpu.planting import HERE, Planted
from tests.onednn import products_leak

pytestmark = pytest.mark.usefixtures("preforked")

LINEAR = ops.find("linear")
FP8 = "fp8_e4m3-row"
W = LINEAR.workload("bf16", {"M": 2, "N": 96, "K": 320}, weight=FP8)


class Planter(Planted):
    formats = frozenset(WEIGHT_FORMATS)

    def __init__(self, function: str, operands: tuple[str, ...] = ()) -> None:
        super().__init__("linear", function, module="planted_weights")
        self.operands = operands

    def recipe(self, w: Workload, fp: object, knobs: Knobs) -> PythonRecipe:
        return PythonRecipe(target=f"planted_weights:{self.function}", path=str(HERE), operands=self.operands)


PARTS = ("x", "w.codes", "w.scales", "bias", "residual")


def proof(function: str, operands: tuple[str, ...] = ()) -> Proof:
    candidate = Planter(function, operands)
    recipe = candidate.recipe(W, None, Knobs())
    return Proof(candidate=candidate, recipe=recipe, digest=function, knobs=Knobs(), workload=W)


def arguments() -> tuple[Tensor, Weight]:
    inputs = LINEAR.inputs(W, 1)
    return inputs["x"], inputs["w"]


# --- parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "operands"), drawn.share([("right", ()), ("by_parts", PARTS)], days=2))
def test_a_right_product_is_proven_with_the_weight_or_with_its_parts(function: str, operands: tuple[str, ...]) -> None:
    found = check(proof(function, operands))
    assert isinstance(found, Passed), found
    assert found.cases > len(LINEAR.cases(W))


@pytest.mark.parametrize(
    ("function", "told", "where"),
    [
        ("writes_scales", "inputs", "w.scales"),
        ("writes_codes", "inputs", "w.codes"),
        ("keeps_weights", "elements", ""),
        ("without_strides", "outside_reads", ""),
    ],
)
def test_a_part_is_guarded_like_any_operand(function: str, told: str, where: str) -> None:
    found = check(proof(function))
    assert isinstance(found, Failed)
    assert found.check == told
    assert where in found.reason


def test_the_baseline_is_proven() -> None:
    fp = fingerprint.take("cpu")
    found = check(built(registry.baseline("linear"), W, fp), fp=fp)
    if isinstance(found, Failed) and products_leak():
        assert found.check in ("outside_reads", "nan_pattern")
    else:
        assert isinstance(found, Passed)


# --- formats a candidate reads ----------------------------------------------------------------------------------------


def test_a_candidate_is_offered_only_the_formats_that_it_names() -> None:
    fp = fingerprint.take("cpu")
    asked = Planted("linear", "right")
    asked.supports = lambda w, fp: pytest.fail("asked")  # type: ignore[method-assign,assignment,misc]
    answer = support_of(asked, W, fp)
    assert isinstance(answer, Rejected)
    assert answer.reason == f"supports weights in plain; the workload's format is {FP8}"
    eligible = {c.name: s for c, s in registry.eligible(W, fp, "full")}
    taken = [name for name, support in eligible.items() if isinstance(support, Accepted)]
    assert taken == ["torch:linear", "cpp:gemv_coded"]


def test_a_users_function_names_the_formats_it_reads(tmp_path: Path) -> None:
    text = "import autosel\n\n\n@autosel.candidate('linear', formats=('fp8_e4m3-row',))\n"
    text += "def mine(x, w, bias, residual): ...\n"
    (tmp_path / "formats_of_mine.py").write_text(text)
    assert from_target("formats_of_mine:mine", "linear", folder=tmp_path).formats == {FP8}


# --- the race ---------------------------------------------------------------------------------------------------------


def test_the_race_gives_each_copy_its_own_parts() -> None:
    operands = SharedOperands(W, 3, llc_bytes=1 << 20)
    try:
        assert operands.streamed_bytes == W.weight_format.nbytes("bf16", 96, 320)
        assert operands.copies > 3
        bench, recipe = Bench(), Planter("right").recipe(W, None, Knobs())
        entrant = Entrant(candidate="user:right", op="linear", recipe=recipe, digest="r", knobs={}, writes_out=True)
        bench.load(entrant)
        bench.prepare(W, operands.inputs, {"user:right": entrant.loaded_name}, 4)
        calls = bench.seats["user:right"].timed.calls  # type: ignore[attr-defined]
        addresses = [part.data_ptr() for call in calls for part in call[1].parts().values()]
        assert len(set(addresses)) == len(addresses) == 8
        assert all(torch.equal(call[1].exact(), operands.inputs["w"].exact()) for call in calls)
        bench.release()
    finally:
        operands.close()


@pytest.mark.parametrize(("format_", "forms"), [("int4-g32", 6), ("q4_k", 2)])
def test_no_timed_call_of_the_baseline_makes_a_form_of_a_weight(
    format_: str, forms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many copies each timed call met a new one. PyTorch's packed int4 is as large as its codes; where PyTorch
    has no product with the codes it reads the numbers, which are 3.6 times as large: fewer are as cold."""
    w = LINEAR.workload("bf16", {"M": 1, "N": 96, "K": 512}, weight=format_)
    inputs = LINEAR.inputs(w, 1)
    bench, baseline = Bench(), registry.baseline("linear")
    recipe = baseline.recipe(w, fingerprint.take("cpu"), Knobs())
    entrant = Entrant(candidate=baseline.name, op="linear", recipe=recipe, digest="b", knobs={}, writes_out=True)
    bench.load(entrant)
    bench.prepare(w, inputs, {"base": entrant.loaded_name}, 6)
    calls = bench.seats["base"].timed.calls  # type: ignore[attr-defined]
    held = [eager_stored._HELD[torch.bfloat16, *eager_stored._memory(call[1])].made for call in calls]
    assert len({made[0].data_ptr() for made in held}) == forms
    for name in ("_packed_int4", "_numbers_held"):
        monkeypatch.setattr(eager_stored, name, lambda *_: pytest.fail("a form was made"))
    monkeypatch.setattr(Weight, "dequantised", lambda *_: pytest.fail("a form was made"))
    for _ in range(len(calls)):
        bench.seats["base"].timed.sample(1)
        assert isinstance(LINEAR.verify(inputs, bench.outputs("base")), Match)
    memory = [eager_stored._memory(call[1]) for call in calls]
    del calls
    bench.release()
    assert not any((torch.bfloat16, *one) in eager_stored._HELD for one in memory)


@pytest.mark.parametrize("n", [32, eager_stored.PACKED_ROWS, 2 * eager_stored.PACKED_ROWS + 96])
def test_codes_packed_some_rows_at_a_time_are_those_that_pytorch_packs_at_once(n: int) -> None:
    w = LINEAR.inputs(LINEAR.workload("bf16", {"M": 1, "N": n, "K": 320}, weight="int4-g32"), 1)["w"]
    codes = torch.stack((w.codes & 15, w.codes >> 4), -1).flatten(1)[:, :320].int().contiguous()
    assert torch.equal(eager_stored._packed_int4(w)[0], torch._convert_weight_to_int4pack_for_cpu(codes, 2))


@pytest.mark.parametrize("format_", ["int4-g32", "q8_0"])
@pytest.mark.parametrize("raced", [True, False])
def test_what_the_baseline_reads_lies_on_large_pages_like_what_candidates_read(format_: str, raced: bool) -> None:
    """On small pages PyTorch read its own form of the weights at half to three quarters of the rate."""
    w = LINEAR.workload("bf16", {"M": 1, "N": 4096, "K": 2048}, weight=format_)
    weights = [LINEAR.inputs(w, 1)["w"] for _ in range(2)]
    x = torch.randn(1, 2048).bfloat16()
    eager_stored.linear(x, weights[0], None, None)
    if raced:
        eager_stored.share_forms(weights, Reused().clone)
    for one in weights if raced else weights[:1]:
        form, *_ = eager_stored._HELD[torch.bfloat16, *eager_stored._memory(one)].made
        assert form.nbytes >= LARGE_PAGE_BYTES and form.data_ptr() % LARGE_PAGE_BYTES == 0


# --- serving ----------------------------------------------------------------------------------------------------------


def is_right(x: Tensor, w: Weight, y: Tensor) -> bool:
    inputs = {"x": x, "w": w, "bias": None, "residual": None}
    return isinstance(LINEAR.verify(inputs, [y]), Match)


def test_best_takes_a_weight_or_a_tensor_each_with_its_own_decision(tmp_path: Path) -> None:
    x, w = arguments()
    fp = fingerprint.take("cpu")
    candidate = Planter("by_parts", PARTS)
    arm = arms.arm(candidate, W, fp, "", Knobs())
    with dispatch.use(tmp_path):
        best = dispatch.best("linear")
        assert is_right(x, w, best(x, w, None, None))
        assert "torch:linear" in best.explain() and "user:by_parts" not in best.explain()
    open_ledger(home=tmp_path).write(
        Record(
            fp=fp,
            workload=W,
            verdict=None,
            race=None,
            parities=[(arm, Passed(cases=1, worst=0.1, worst_case="random"))],
            arm=arm,
            baseline=arms.arm(registry.baseline("linear"), W, fp, "", Knobs()),
            mode=current_mode(),
            state="promoted",
            reason="for the test",
            idempotency_key="one",
        )
    )
    with dispatch.use(tmp_path):
        bound = dispatch.best("linear", like=(x, w, None, None))
        assert bound.candidate == "user:by_parts"
        out = torch.empty(2, 96, dtype=torch.bfloat16)
        assert bound(x, w, None, None, out) is out and is_right(x, w, out)
        best, plain = dispatch.best("linear"), w.dequantised(torch.bfloat16)
        for _ in range(2):
            assert is_right(x, w, best(x, w, None, None))
            best(x, plain, None, None)
        assert "user:by_parts" in best.explain() and "torch:linear" in best.explain()


@pytest.mark.parametrize("op", ["norm_qkv", "gate_up", "lm_head"])
def test_every_projection_takes_a_weight(op: str, tmp_path: Path) -> None:
    contract = ops.find(op)
    dims = {"norm_qkv": {"M": 2, "d": 64, "N": 48}, "gate_up": {"M": 2, "d": 64, "I": 48}}
    w = contract.workload("bf16", dims.get(op, {"M": 2, "V": 48, "d": 64}), weight=FP8)
    inputs = contract.inputs(w, 1)
    with dispatch.use(tmp_path):
        made = dispatch.best(op)(*contract.arguments(inputs))
    assert isinstance(contract.verify(inputs, [made]), Match)
