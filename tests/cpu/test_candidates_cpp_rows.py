"""Test the row kernels (rmsnorm, add_rmsnorm, rope, swiglu, geglu, sample) in two instruction sets of this CPU: its
choice and another a day. The vector functions are tested in all."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autosel.devices.cpu import machine
from autosel.native.compile import compile_source, find_compiler
from autosel.native.isa import ISA_FLAGS, ISA_NEEDS, Isa, best_isa
from autosel.native.load import load_entry
from autosel.ops import OPS
from autosel.ops.contract import Inputs, Mismatch, Op
from autosel.values import DTypeName, Workload
from tests import drawn
from tests.cpu.row_claims import (
    SAMPLING,
    judged,
    keep_far_angle,
    rotate_slices_in_place,
    sample_equal_logits,
    sample_without_distribution,
    update_residual_in_place,
)
from tests.cpu.side_by_side import mismatches

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
HERE = Path(__file__).parent
DTYPES: tuple[DTypeName, ...] = ("bf16", "fp16", "fp32")
FLAGS = tuple(machine.identity()["isa"])
ISAS = [
    pytest.param(isa, marks=pytest.mark.skipif(not set(needs) <= set(FLAGS), reason=f"this CPU lacks {isa}"))
    for isa, needs in ISA_NEEDS.items()
]
HAVE: tuple[Isa, ...] = tuple(isa for isa, needs in ISA_NEEDS.items() if set(needs) <= set(FLAGS))
TODAY = HAVE if drawn.every or len(HAVE) < 3 else (HAVE[0], drawn.todays(HAVE[1:]))

# op -> its shape, and the traits that are combined
SHAPES: dict[str, tuple[dict[str, int], dict[str, tuple[Any, ...]]]] = {
    "rmsnorm": ({"M": 4, "d": 4096}, {"offset": (0.0, 1.0)}),
    "add_rmsnorm": ({"M": 4, "d": 4096}, {"offset": (0.0, 1.0), "sandwich": (0, 1, 2)}),
    "rope": ({"M": 4, "Hq": 32, "Hkv": 8, "D": 128, "R": 128}, {"style": (0, 1)}),
    "swiglu": ({"M": 3, "I": 14336}, {}),
    "geglu": ({"M": 3, "I": 6912}, {"tanh": (0, 1)}),
    "sample": ({"B": 2, "V": 128_256, "L": 64}, {}),
}


@cache
def entry(op: str, isa: Isa) -> Callable[..., None]:
    """Return the kernel built for this machine; other instruction sets from one source with all of them."""
    own = isa == best_isa(FLAGS)
    source = f"cpu/{op}.cpp" if own else str(HERE / "row_kernels.cpp")
    return load_entry(compile_source(source, ISA_FLAGS[isa]).digest, op)


def run(op: Op, w: Workload, isa: Isa, threads: int, inputs: Inputs) -> list[torch.Tensor]:
    """Return the results, from outputs full of NaN (or nonsense integers)."""
    outputs = op.allocate(w, fill=float("nan"))
    entry(op.name, isa)(*op.arguments(inputs), *outputs, threads)
    return [o for o in outputs if o is not None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_a_row_kernel_meets_its_contract_in_every_case(name: str, dtype: DTypeName) -> None:
    """Run the instruction sets on the same inputs."""
    op, (dims, traits) = OPS[name], SHAPES[name]
    wrong = []
    for values in itertools.product(*traits.values()):
        w = op.workload(dtype, dims, **dict(zip(traits, values, strict=True)))
        for number, made in enumerate(op.cases(w)):
            threads = {isa: 1 + (number + at) % 3 for at, isa in enumerate(TODAY)}
            runs = {isa: partial(run, op, made.workload, isa, threads[isa]) for isa in TODAY}
            for isa, found in mismatches(op, made, 11, runs):
                wrong.append(f"{isa} {made.workload.key} {made.name}, {threads[isa]} threads: {found.reason}")
    assert not wrong, "\n".join(wrong)


# --- what the op's battery does not reach ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "name", "given", "threads"),
    [
        *((update_residual_in_place, "add_rmsnorm", (sandwich,), 2) for sandwich in (0, 1, 2)),
        *((rotate_slices_in_place, "rope", (style,), 2) for style in (0, 1)),
        *((keep_far_angle, "rope", (position,), 1) for position in (1 << 17, (1 << 20) + 7, (1 << 31) - 1)),
        (sample_equal_logits, "sample", (), 1),
        *((sample_without_distribution, "sample", (poison,), 3) for poison in (math.nan, math.inf, -math.inf)),
    ],
)
def test_a_row_kernel_keeps_each_claim(
    claim: Callable[..., None], name: str, given: tuple[float, ...], threads: int
) -> None:
    claim(entry(name, best_isa(FLAGS)), *given, threads)


@pytest.mark.parametrize(("what", "settings"), SAMPLING, ids=[s[0] for s in SAMPLING])
def test_a_real_vocabulary_is_sampled_as_defined(what: str, settings: dict[str, float]) -> None:
    found = judged(settings, entry("sample", best_isa(FLAGS)), 2)
    assert not isinstance(found, Mismatch), found


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("rmsnorm", lambda t: (t(2, 8), t(9), 1e-6, 0.0, t(2, 8), 1)),
        ("rmsnorm", lambda t: (t(8, 2).T, t(8), 1e-6, 0.0, t(2, 8), 1)),
        ("add_rmsnorm", lambda t: (t(2, 8), t(2, 7), t(8), 1e-6, 0.0, 0, t(2, 8), t(2, 8), 1)),
        ("swiglu", lambda t: (t(2, 8), t(2, 8), t(3, 8), 1)),
        ("geglu", lambda t: (t(2, 8), t(2, 8).half(), 0, t(2, 8), 1)),
        ("rope", lambda t: (t(1, 1, 8), t(1, 1, 8), torch.zeros(1).int(), t(4), 0, t(1, 1, 8), t(1, 1, 8), 1)),
        ("rope", lambda t: (t(1, 1, 8), t(1, 1, 8), torch.zeros(1).long(), t(5), 0, t(1, 1, 8), t(1, 1, 8), 1)),
        ("sample", lambda t: (t(1, 8), torch.zeros(1, 1), *[t(1)] * 5, torch.zeros(1).long(), 1)),
    ],
)
def test_arguments_of_another_shape_or_dtype_are_refused(
    name: str, arguments: Callable[[Any], tuple[Any, ...]]
) -> None:
    with pytest.raises((ValueError, TypeError)):
        entry(name, best_isa(FLAGS))(*arguments(torch.zeros))


# --- the vector functions --------------------------------------------------------------------------------------------


@cache
def vectors(isa: Isa) -> ctypes.CDLL:
    made = compile_source(str(HERE / "vectors.cpp"), ("-Wl,--as-needed", *ISA_FLAGS[isa]))
    return ctypes.CDLL(str(made.path))


def mapped(isa: Isa, function: str, x: np.ndarray, out: type = np.float32) -> np.ndarray:
    assert len(x) % 16 == 0
    y = np.empty(len(x), dtype=out)
    getattr(vectors(isa), function)(
        x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(x))
    )
    return y


@pytest.mark.parametrize("isa", ISAS)
def test_exp_is_within_two_units_in_the_last_place(isa: Isa) -> None:
    x = np.concatenate([np.linspace(-87.33, 88.72, 1 << 20), np.geomspace(1e-30, 1, 1 << 12)]).astype(np.float32)
    want = np.exp(x.astype(np.float64))
    with np.errstate(over="ignore"):
        got = mapped(isa, "map_exp", x).astype(np.float64)
    assert (np.abs(got - want) / want).max() < 2.0**-23


@pytest.mark.parametrize("isa", ISAS)
def test_exp_at_its_ends(isa: Isa) -> None:
    x = np.array([-np.inf, -1e30, -88.0, 0.0, -0.0, 88.8, 1e30, np.inf, np.nan, *[1.0] * 7], dtype=np.float32)
    y = mapped(isa, "map_exp", x)
    assert y[:8].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, math.inf, math.inf, math.inf]
    assert math.isnan(y[8])


def tanh_argument(x: torch.Tensor) -> torch.Tensor:
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("function", "exact", "argument"),
    [
        ("map_silu", lambda x: x * torch.sigmoid(x), lambda x: x),
        ("map_gelu_tanh", lambda x: x * torch.sigmoid(tanh_argument(x)), tanh_argument),
        ("map_gelu_erf", lambda x: x * torch.special.erfc(-x / math.sqrt(2)) / 2, lambda x: x.square() / 2),
    ],
    ids=["silu", "gelu_tanh", "gelu_erf"],
)
def test_an_activation_keeps_its_digits_where_the_textbook_form_cancels(
    isa: Isa, function: str, exact: Callable[..., torch.Tensor], argument: Callable[..., torch.Tensor]
) -> None:
    """Check the relative error: gelu(-5) is -1.4e-6, of which the form 1 + erf in fp32 keeps one digit.

    The bound is three roundings of exp's argument and eight others.
    """
    x = torch.linspace(-6, 12, 1 << 16)
    want = exact(x.double()).numpy()
    got = mapped(isa, function, x.numpy()).astype(np.float64)
    allowed = (8 + 3 * argument(x.double()).abs().numpy()) * 2.0**-24 * np.abs(want)
    assert (np.abs(got - want) <= allowed + 2.0**-126).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_every_half_precision_number_survives_the_round_trip(isa: Isa, name: str, dtype: torch.dtype) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    want = torch.from_numpy(bits.view(np.int16)).view(dtype).float().numpy()
    got = mapped(isa, f"widen_{name}", bits)
    assert np.array_equal(got, want, equal_nan=True)
    back = mapped(isa, f"narrow_{name}", got, np.uint16)
    normal = ~np.isnan(want) & ~((name == "bf16") & (np.abs(want) < 2.0**-126))  # vcvtneps2bf16 flushes: allowed
    assert np.array_equal(back[normal], bits[normal])
    assert np.isnan(torch.from_numpy(back.view(np.int16)).view(dtype).float().numpy()[np.isnan(want)]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_stores_round_to_nearest_even(isa: Isa, name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1 << 16, generator=generator) * torch.logspace(-4, 5.5, 1 << 16)
    halfway = (x.to(dtype).float() + x.to(dtype).nextafter(torch.tensor(9.0, dtype=dtype)).float()) / 2
    for values in (x, halfway):
        got = torch.from_numpy(mapped(isa, f"narrow_{name}", values.numpy(), np.uint16).view(np.int16)).view(dtype)
        assert torch.equal(got, values.to(dtype))
