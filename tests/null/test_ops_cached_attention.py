"""Test attn over keys and values in a format: values worked by hand, and each mistake of a kernel is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autosel.errors import BadArguments
from autosel.formats import CACHE_FORMATS
from autosel.ops import OPS, eager, eager_stored
from autosel.ops.cached import Cached, quantise_cache
from autosel.ops.contract import Case, Match, Mismatch
from autosel.values import DTypeName
from tests.null.test_ops_weight import e4m3, flushed, fnuz, half_down, nan_as_480, unsigned

DTYPES: tuple[DTypeName, ...] = ("bf16", "fp16", "fp32")
FORMATS = [name for name in CACHE_FORMATS if name != "plain"]
FP8 = "fp8_e4m3-head"
Numbers = Callable[[Tensor], Tensor]
OP = OPS["attn"]
CACHE = {"B": 2, "Hq": 4, "Hkv": 2, "S": 1, "D": 64, "L": 200}


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_attention_over_codes_worked_out_by_hand() -> None:
    """Attend to two keys of equal scores: the result is the mean of their values, 448 and 2^-9, times the scale."""
    k = Cached.of(FP8, codes=e4m3(0x38, 0x38).view(1, 1, 2, 1), scales=torch.tensor([3.0]))
    v = Cached.of(FP8, codes=e4m3(0x7E, 0x01).view(1, 1, 2, 1), scales=torch.tensor([0.5]))
    rest = {"lengths": None, "max_len": 2, "scale": 0.0, "window": 0, "softcap": 0.0}
    inputs = {"q": torch.ones(1, 1, 1, 1), "k": k, "v": v, **rest}
    assert OP.reference(inputs)[0].item() == (448 + 2.0**-9) / 4
    assert eager_stored.attn(*OP.arguments(inputs)).item() == (448 + 2.0**-9) / 4


@pytest.mark.parametrize("name", FORMATS)
def test_heads_are_quantised_to_their_largest_element_and_come_back(name: str) -> None:
    x = torch.randn(2, 3, 40, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[:, 1] = 0.0
    made = quantise_cache(x, name)
    assert isinstance(made, Cached) and made.scales[1] == 1.0 and not made.codes[:, 1].float().any()
    largest = made.codes.float().abs().amax((0, 2, 3))
    assert largest[0] == largest[2] == made.codes.float().abs().max()
    error = (made.exact() - x.double()).abs()
    assert (error <= 2.0**-4 * x.double().abs() + made.by_element() / 2).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("traits", [{}, {"ragged": True, "window": 37, "softcap": 20.0}], ids=["plain", "all"])
def test_the_eager_op_passes_every_case(dtype: DTypeName, name: str, traits: dict[str, Any]) -> None:
    wrong = []
    for case in OP.cases(OP.workload(dtype, CACHE, **traits, cache=name)):
        inputs = case.make(5)
        assert OP.workload_of(inputs) == case.workload
        found = OP.verify(inputs, [eager_stored.attn(*OP.arguments(inputs))])
        wrong += [f"{case.name}: {found}"] if isinstance(found, Mismatch) else []
    assert not wrong, "\n".join(wrong)


# --- mistakes ---------------------------------------------------------------------------------------------------------


def neighbour(scales: Tensor) -> Tensor:
    return scales.roll(1)


def never_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


def nan_ignored(scales: Tensor) -> Tensor:
    return scales.nan_to_num()


def attended(inputs: dict[str, Any], wrong: dict[str, Numbers]) -> Tensor:
    """Compute attn eagerly on the dequantised numbers; `wrong` changes a part: `k.codes`, `v.scales` ..."""

    def read(name: str) -> Tensor:
        codes, scales = inputs[name].codes.float(), inputs[name].scales
        codes = wrong.get(f"{name}.codes", lambda x: x)(codes)
        return codes * wrong.get(f"{name}.scales", lambda x: x)(scales)[:, None, None]

    rest = (inputs[n] for n in ("lengths", "max_len", "scale", "window", "softcap"))
    return eager.attn(inputs["q"].float(), read("k"), read("v"), *rest).to(inputs["q"].dtype)


def judged(made: Case, **wrong: Numbers) -> Match | Mismatch:
    return OP.verify(made.make(5), [attended(made.make(5), wrong)])


def case_named(name: str) -> Case:
    return next(c for c in OP.cases(OP.workload("bf16", CACHE, cache=FP8)) if c.name == name)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("subnormals alone in v", {"v.codes": flushed}),
        ("every code in v", {"v.codes": half_down}),
        ("every code in k", {"k.codes": unsigned}),
        ("largest and smallest codes in v", {"v.codes": fnuz}),
        ("nan in k", {"k.codes": nan_as_480}),
        ("nan in v", {"v.codes": nan_as_480}),
        ("scales that are powers of two in k", {"k.scales": neighbour}),
        ("scales that are powers of two in v", {"v.scales": neighbour}),
        ("negative scales in k", {"k.scales": unsigned}),
        ("negative scales in v", {"v.scales": unsigned}),
        ("zero scales in v", {"v.scales": never_zero}),
        ("nan scales in k", {"k.scales": nan_ignored}),
        ("nan scales in v", {"v.scales": nan_ignored}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_each_case_refuses_its_mistake(name: str, wrong: dict[str, Numbers]) -> None:
    made = case_named(name)
    assert isinstance(judged(made), Match)
    assert isinstance(judged(made, **wrong), Mismatch)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("codes", lambda t: t.to(torch.bfloat16), "float8_e4m3fn"),
        ("codes", lambda t: t[..., ::2], r"expected \(2, 2, 200, 64\)"),
        ("scales", lambda t: t[:1], r"expected \(2,\)"),
        ("scales", lambda t: t.double(), "float32"),
        ("scales", lambda t: None, "has scales"),
    ],
)
def test_a_part_that_is_not_the_formats_is_named(part: str, change: Callable[[Tensor], Any], said: str) -> None:
    inputs = OP.inputs(OP.workload("bf16", CACHE, cache=FP8), 1)
    parts = inputs["k"].parts()
    inputs["k"] = Cached.of(FP8, shape=inputs["k"].shape, **{**parts, part: change(parts[part])})
    with pytest.raises(BadArguments, match=said):
        OP.workload_of(inputs)


def test_codes_without_their_scales_are_refused_with_what_to_pass() -> None:
    inputs = OP.inputs(OP.workload("bf16", CACHE, cache=FP8), 1)
    with pytest.raises(BadArguments, match="codes without their scales"):
        OP.workload_of({**inputs, "k": inputs["k"].codes})


def test_keys_and_values_have_one_format() -> None:
    inputs = OP.inputs(OP.workload("bf16", CACHE, cache=FP8), 1)
    plain = OP.inputs(OP.workload("bf16", CACHE), 1)
    with pytest.raises(BadArguments, match="k is fp8_e4m3-head, v is plain"):
        OP.workload_of({**inputs, "v": plain["v"]})
