"""The ops on fp8 operands: values worked out by hand, and the mistakes a kernel makes with e4m3, each refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autosel.ops import OPS, eager, fp8
from autosel.ops.contract import Case, Match, Mismatch, Op
from autosel.ops.draw import Draw
from autosel.values import DTypeName

DTYPES: tuple[DTypeName, ...] = ("bf16", "fp16", "fp32")
Numbers = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def e4m3(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_a_scaled_product_of_bytes_worked_out_by_hand() -> None:
    """0x01 is 2^-9, 0x7e 448, 0xb8 -1, 0x08 2^-6."""
    op = OPS["gemv_fp8"]
    w = torch.stack([e4m3(0x01, 0x7E), e4m3(0xB8, 0x08)])
    added = {"bias": torch.tensor([1.0, 2.0]), "residual": None}
    inputs = {"x": torch.tensor([[512.0, 0.25]]), "w": w, "scale": torch.tensor([2.0, -0.5]), **added}
    # (512/512 + 448/4) * 2 + 1; (-512 + 1/256) * -0.5 + 2
    want = [[227.0, 258.0 - 1 / 512]]
    assert op.reference(inputs)[0].tolist() == want
    assert eager.gemv_fp8(*op.arguments(inputs)).tolist() == want


def test_rows_are_quantised_to_their_largest_element_and_come_back() -> None:
    w = torch.randn(300, 70, generator=torch.Generator().manual_seed(3)).bfloat16()
    w[4], w[7, 3] = 0.0, 3e38
    found, scale = fp8.row_quantised(w)
    numbers = found.float()
    assert numbers.isfinite().all() and scale[4] == 1.0 and not numbers[4].any()
    assert (numbers.abs().amax(1)[w.any(1)] == fp8.MOST).all()
    error = (numbers.double() * scale.double()[:, None] - w.double()).abs()
    half_step = torch.maximum(2.0**-4 * w.double().abs(), fp8.LEAST / 2 * scale.double()[:, None])
    assert (error <= half_step * (1 + 1e-6)).all()


def test_every_byte_is_every_byte() -> None:
    found = fp8.every_byte((2, 254), Draw(1, "bf16")).view(torch.uint8)
    assert sorted(found.flatten().tolist()) == sorted([b for b in range(256) if b & 127 != 127] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("traits", [{}, {"bias": True, "residual": True}], ids=["plain", "added"])
def test_the_eager_way_passes_every_case(dtype: DTypeName, traits: dict[str, bool]) -> None:
    op, wrong = OPS["gemv_fp8"], []
    for case in op.cases(op.workload(dtype, {"M": 5, "N": 64, "K": 256}, **traits)):
        inputs = case.make(5)
        assert op.workload_of(inputs) == case.workload
        found = op.verify(inputs, [eager.gemv_fp8(*op.arguments(inputs))])
        wrong += [f"{case.name}: {found}"] if isinstance(found, Mismatch) else []
    assert not wrong, "\n".join(wrong)


# --- mistakes ---------------------------------------------------------------------------------------------------------


def flushed(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 2.0**-6, 0.0, x)


def nan_as_480(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 480.0, x)


def fnuz(x: Tensor) -> Tensor:
    """The other e4m3, of half the size, with infinity where 448 is."""
    return torch.where(x.abs() == 448.0, float("inf"), x)


def unsigned(x: Tensor) -> Tensor:
    return x.abs()


def half_down(x: Tensor) -> Tensor:
    """A mantissa bit lost."""
    return x.view(-1).view(torch.int32).bitwise_and(~0x1FFFFF).view(torch.float32).view(x.shape)


PRODUCT = {"M": 3, "N": 64, "K": 256}
MISREAD = [flushed, nan_as_480, fnuz, unsigned, half_down]
MISSCALED: dict[str, Numbers] = {
    "a neighbour's": lambda s: s.roll(1),
    "one for all": lambda s: s[:1].expand(len(s)),
    "rounded to bf16": lambda s: s.bfloat16().float() * (1 + 2.0**-6),
    "squared": lambda s: s * s,
    "its size": lambda s: s.abs(),
    "never zero": lambda s: torch.where(s == 0, 1.0, s),
    "nan ignored": lambda s: s.nan_to_num(),
}


def passes(op: Op, dims: dict[str, int], run: Callable[[dict[str, Any]], Tensor]) -> bool:
    """All cases but the long sums; up to the first that refuses."""
    small = (c for c in op.cases(op.workload("bf16", dims)) if c.covers != "long sums")
    return all(isinstance(op.verify(c.make(5), [run(c.make(5))]), Match) for c in small)


def product(inputs: dict[str, Any], read: Numbers = lambda x: x, scaled: Numbers = lambda s: s) -> Tensor:
    w = read(inputs["w"].float())
    return ((inputs["x"].float() @ w.T) * scaled(inputs["scale"])).to(inputs["x"].dtype)


def test_a_right_product_passes() -> None:
    assert passes(OPS["gemv_fp8"], PRODUCT, product)


@pytest.mark.parametrize("read", MISREAD, ids=lambda f: f.__name__)
def test_bytes_misread_are_refused(read: Numbers) -> None:
    assert not passes(OPS["gemv_fp8"], PRODUCT, lambda inputs: product(inputs, read))


@pytest.mark.parametrize("name", MISSCALED)
def test_a_wrong_scale_is_refused(name: str) -> None:
    assert not passes(OPS["gemv_fp8"], PRODUCT, lambda inputs: product(inputs, scaled=MISSCALED[name]))


# --- attention --------------------------------------------------------------------------------------------------------

CACHE = {"B": 2, "Hq": 4, "Hkv": 2, "S": 1, "D": 64, "L": 200}


def attended(inputs: dict[str, Any], **wrong: Numbers) -> Tensor:
    """By attn's own eager way on the numbers; `wrong` changes an operand: k and v as read, k_scale, v_scale."""
    given = {n: wrong.get(n, lambda x: x)(inputs[n].float()) for n in ("k", "v", "k_scale", "v_scale")}
    k, v = (given[n] * given[f"{n}_scale"][:, None, None] for n in ("k", "v"))
    rest = (inputs[n] for n in ("lengths", "max_len", "scale", "window", "softcap"))
    return eager.attn(inputs["q"].float(), k, v, *rest).to(inputs["q"].dtype)


def judged(made: Case, **wrong: Numbers) -> Match | Mismatch:
    inputs = made.make(5)
    return OPS["attn_decode_fp8"].verify(inputs, [attended(made.make(5), **wrong)])


def case_named(name: str) -> Case:
    op = OPS["attn_decode_fp8"]
    return next(c for c in op.cases(op.workload("bf16", CACHE)) if c.name == name)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("subnormals alone in v", {"v": flushed}),
        ("every number in v", {"v": half_down}),
        ("every number in k", {"k": unsigned}),
        ("448 and -448 in v", {"v": fnuz}),
        ("0xff in k", {"k": nan_as_480}),
        ("0xff in v", {"v": nan_as_480}),
        ("a scale a head in k_scale", {"k_scale": MISSCALED["a neighbour's"]}),
        ("a scale a head in v_scale", {"v_scale": MISSCALED["a neighbour's"]}),
        ("negative in k_scale", {"k_scale": MISSCALED["its size"]}),
        ("negative in v_scale", {"v_scale": MISSCALED["its size"]}),
        ("zero in v_scale", {"v_scale": MISSCALED["never zero"]}),
        ("nan in k_scale", {"k_scale": MISSCALED["nan ignored"]}),
        ("nan in v_scale", {"v_scale": MISSCALED["nan ignored"]}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_case_refuses_the_mistake_it_is_there_for(name: str, wrong: dict[str, Numbers]) -> None:
    made = case_named(name)
    assert isinstance(judged(made), Match)
    assert isinstance(judged(made, **wrong), Mismatch)


def test_attention_over_bytes_worked_out_by_hand() -> None:
    """Two keys of equal scores: the mean of their values, 448 and 2^-9, by the scale."""
    op = OPS["attn_decode_fp8"]
    k, v = e4m3(0x38, 0x38).view(1, 1, 2, 1), e4m3(0x7E, 0x01).view(1, 1, 2, 1)
    scales = {"k_scale": torch.tensor([3.0]), "v_scale": torch.tensor([0.5])}
    rest = {"lengths": None, "max_len": 2, "scale": 0.0, "window": 0, "softcap": 0.0}
    inputs = {"q": torch.ones(1, 1, 1, 1), "k": k, "v": v, **scales, **rest}
    assert op.reference(inputs)[0].item() == (448 + 2.0**-9) / 4
