"""Test weights in a candidate's layout: found by identity, never served after the weight has changed, freed with it."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from autosel.candidates import layouts, registry
from autosel.candidates.layouts import Packed, Prepare, Store
from autosel.candidates.load import load, reader_of
from autosel.devices.cpu import machine
from autosel.errors import BuildError, ParityError
from autosel.native.compile import compile_source, find_compiler
from autosel.ops import OPS
from autosel.values import Accepted, Fingerprint, Layout, NativeRecipe, PythonRecipe, Recipe

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
]
OP = OPS["linear"]
KNOBS = {"threads": 2, "rows": 8}


@pytest.fixture(scope="module")
def built() -> tuple[NativeRecipe, str]:
    fp = Fingerprint(kind="cpu", name="test", identity=machine.identity(), environment={}, rates={})
    w = OP.workload("bf16", {"M": 1, "N": 64, "K": 256})
    candidate = registry.find("linear", "cpp:gemv_packed")
    support = candidate.supports(w, fp)
    if not isinstance(support, Accepted):
        pytest.skip(support.reason)
    recipe = candidate.recipe(w, fp, None)  # type: ignore[arg-type]
    assert isinstance(recipe, NativeRecipe)
    return recipe, compile_source(recipe.source, recipe.flags).digest


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(layouts, "STORE", made)
    return made


class Served:
    """A loaded candidate for OP, with the reader and the store of its prepared weights."""

    def __init__(self, recipe: Recipe, digest: str, knobs: dict[str, int]) -> None:
        self.function = load(OP, recipe, digest, knobs)
        reader = reader_of(self.function)
        assert reader is not None
        self.reader, self.store = reader, reader.store

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        got: Tensor = self.function(x, w, None, None)
        return got.double()

    def right(self, x: Tensor, w: Tensor) -> bool:
        return torch.allclose(self(x, w), x.double() @ w.double().T, rtol=0.02, atol=0.02)

    def prepared(self, w: Tensor) -> Tensor:
        for _ in range(2):
            self(vector(), w)
        return w

    def held(self, w: Tensor) -> Packed | None:
        return self.store.peek(self.reader.prepare_one, w)


@pytest.fixture
def linear(built: tuple[NativeRecipe, str], store: Store) -> Served:
    return Served(*built, KNOBS)


def weight(n: int = 64, k: int = 512, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).mul(0.02).bfloat16()


def vector(k: int = 512) -> Tensor:
    return torch.randn(1, k, generator=torch.Generator().manual_seed(9)).bfloat16()


# --- when a weight is prepared ---------------------------------------------------------------------------------------


def test_a_weight_is_prepared_at_its_second_call(linear: Served) -> None:
    x, w = vector(), weight()
    first = linear(x, w)
    assert linear.store.bytes == 0
    again = linear(x, w)
    assert 0.75 * w.nbytes < linear.store.bytes < 0.9 * w.nbytes
    assert torch.equal(first, again) and linear.right(x, w)


def test_weights_made_for_one_call_are_never_prepared(linear: Served) -> None:
    for seed in range(5):
        assert linear.right(vector(), weight(seed=seed))
    assert linear.store.bytes == 0


def test_another_tensor_of_the_same_memory_reads_the_same_prepared_weight(linear: Served) -> None:
    w = linear.prepared(weight())
    made = linear.held(w)
    assert made is not None and linear.held(w.view(64, 512)) is made
    assert linear.held(w[:32]) is None


def test_weights_whose_exponents_have_no_codes_are_read_plain(linear: Served) -> None:
    x, w = torch.ones(1, 512).bfloat16(), torch.exp2(torch.rand(64, 512) * 60 - 60).bfloat16()
    for _ in range(3):
        assert linear.right(x, w)
    assert linear.store.bytes == 0
    assert "1 read plain: lossless-12 needs" in linear.reader.told() and "at most 90%" in linear.reader.told()


def test_the_memory_limit_is_kept_and_no_weight_is_evicted(linear: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, x = weight(seed=1), weight(seed=2), vector()
    monkeypatch.setattr(layouts.settings, "get", lambda name: 1.2 * one.nbytes / 1e9 if name == "layout_gb" else None)
    for w in (one, other, one, other, one, other):
        assert linear.right(x, w)
    assert linear.held(one) is not None and linear.held(other) is None
    assert "AUTOSEL_LAYOUT_GB" in linear.reader.told()


def test_a_weight_that_would_use_the_last_memory_is_read_plain(linear: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: layouts.RESERVE_BYTES + 100)
    x, w = vector(), weight()
    for _ in range(3):
        assert linear.right(x, w)
    assert linear.store.bytes == 0 and "less than 1 GiB" in linear.reader.told()


def test_nothing_is_prepared_while_the_store_is_paused(linear: Served) -> None:
    x, w = vector(), weight()
    with linear.store.paused():
        for _ in range(3):
            assert linear.right(x, w)
        assert linear.store.bytes == 0
    linear(x, w)
    assert linear.store.bytes > 0


# --- changed weights -------------------------------------------------------------------------------------------------


def test_a_weight_written_in_place_is_never_served_with_old_contents(linear: Served) -> None:
    x, w = vector(), linear.prepared(weight())
    assert linear.store.bytes > 0
    with torch.no_grad():
        w[3, 5] = 100.0  # a single one, which no sample would find
    assert linear.right(x, w)
    assert linear.right(x, w) and linear.store.bytes > 0  # and the new contents are prepared


def test_a_whole_weight_written_without_the_version_counter_is_never_served_with_old_contents(linear: Served) -> None:
    x, w = vector(), linear.prepared(weight())
    version = w._version
    w.data.copy_(weight(seed=5))
    assert w._version == version
    assert linear.right(x, w)
    w.view(torch.int16).numpy()[:] = weight(seed=6).view(torch.int16).numpy()
    assert linear.right(x, w)


def test_one_weight_written_without_the_version_counter_is_found_within_one_round_of_checks(linear: Served) -> None:
    x, w = torch.ones(1, 512).bfloat16(), linear.prepared(weight())
    w.data[40, 300] = 1000.0
    units = 64 * 512 // 128
    assert any(linear.right(x, w) for _ in range(-(-units // 8)))
    assert all(linear.right(x, w) for _ in range(50))  # and never again


def test_a_new_weight_at_the_same_address_is_not_taken_for_the_old_one(linear: Served) -> None:
    memory = bytearray(64 * 512 * 2)

    def there(seed: int) -> Tensor:
        made = torch.frombuffer(memory, dtype=torch.bfloat16).view(64, 512)
        made.copy_(weight(seed=seed))
        return made

    one = linear.prepared(there(1))
    at = one.data_ptr()
    del one
    gc.collect()
    other = there(2)
    assert other.data_ptr() == at
    assert linear.right(vector(), other) and linear.right(vector(), other)


def test_new_memory_of_a_parameter_is_noticed(linear: Served) -> None:
    x, w = vector(), torch.nn.Parameter(linear.prepared(weight()), requires_grad=False)
    linear.prepared(w)
    w.data = weight(seed=4)
    assert linear.right(x, w)


def test_a_weight_that_is_written_repeatedly_is_read_plain(linear: Served) -> None:
    x, w = vector(), weight()
    for _ in range(layouts.MOST_CHANGES):
        linear.prepared(w)
        w.mul_(1.5)
        assert linear.right(x, w)
    linear.prepared(w)
    assert linear.store.bytes == 0 and "written to 3 times" in linear.reader.told()


def test_tensors_of_inference_mode_have_no_version_and_are_read_plain(linear: Served) -> None:
    with torch.inference_mode():
        x, w = vector(), weight()
        for _ in range(3):
            assert linear.right(x, w)
        w.mul_(2)
        assert linear.right(x, w)
    assert linear.store.bytes == 0


def test_an_inference_tensor_with_replaced_data_is_served(linear: Served) -> None:
    with torch.inference_mode():
        x, w = vector(), torch.nn.Parameter(weight(), requires_grad=False)
    for data in (weight(), weight(seed=3)):
        w.data = data
        for _ in range(3):
            assert linear.right(x, w)


def test_an_owner_may_guarantee_that_inference_tensors_do_not_change(linear: Served) -> None:
    with torch.inference_mode():
        x, w = vector(), weight()
        linear(x, w)
        linear.reader.ready((x, w, None, None))
        assert linear.store.bytes > 0 and linear.reader.of(w) is not None and linear.right(x, w)
        w.copy_(weight(seed=3))  # the guarantee is broken: a change of a whole matrix is still found
        assert linear.right(x, w)


def test_a_prepared_weight_is_freed_with_its_weight(linear: Served) -> None:
    w = linear.prepared(weight())
    assert linear.store.bytes > 0
    del w
    gc.collect()
    linear.store.sweep()
    assert linear.store.bytes == 0 and not linear.store.kept


# --- before races, proofs and steps ----------------------------------------------------------------------------------


def test_prepare_returns_bytes_seconds_and_version(linear: Served) -> None:
    w = weight()
    took = linear.reader.prepare((vector(), w, None, None))
    assert took is not None and took.layout == "lossless-12" and took.version == linear.reader.layout.version
    assert took.plain_bytes == w.nbytes and 0.75 * w.nbytes < took.bytes < 0.8 * w.nbytes and took.seconds > 0
    assert linear.reader.saved_bytes({"w": w}) == took.saved_bytes == w.nbytes - took.bytes


@pytest.mark.parametrize("rows", [64, 4096], ids=["small", "on large pages"])
def test_copies_of_a_weight_are_prepared_by_copying_and_give_its_bits(linear: Served, rows: int) -> None:
    first, *others = (weight(n=rows) for _ in range(3))
    x, made = vector(), []
    prepare = linear.reader.prepare_one
    counted = Mock(wraps=prepare.make)
    with patch.object(prepare, "make", counted):
        took = linear.reader.prepare_copies([(x, w, None, None) for w in (first, *others)])
        calls_for_one = counted.call_count
        linear.reader.prepare((x, weight(n=rows), None, None))
    assert counted.call_count == 2 * calls_for_one, "the copies called it too"
    for w in (first, *others):
        packed = linear.held(w)
        assert packed is not None and took is not None and packed.bytes == took.bytes
        made.append(packed.operand)
    assert all(torch.equal(operand, made[0]) for operand in made[1:])
    assert len({operand.data_ptr() for operand in made}) == 3 and all(o.data_ptr() % 64 == 0 for o in made)


def test_forgotten_weights_are_prepared_again_only_when_they_are_called(linear: Served) -> None:
    w = linear.prepared(weight())
    linear.store.forget([w])
    assert linear.store.bytes == 0 and linear.reader.saved_bytes({"w": w}) == 0
    linear.prepared(w)
    assert linear.store.bytes > 0


def test_prepared_weights_that_differ_from_the_weight_are_refused(
    built: tuple[NativeRecipe, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, digest = built
    assert recipe.layout is not None
    prepare = Prepare.of_artefact(recipe.layout, recipe.flags, digest, 1)
    monkeypatch.setattr(prepare, "compare", lambda made, w, told, threads: told.fill_(3))
    with pytest.raises(ParityError, match="prepared weights differ from the weights") as refused:
        prepare(weight())
    assert "3 units of a matrix (64, 512)" in refused.value.why


# --- Python candidates -----------------------------------------------------------------------------------------------


def doubled(w: Tensor) -> Tensor:
    """Return a layout for tests: the weight in fp32."""
    return w.float()


def same(made: Tensor, w: Tensor) -> bool:
    return torch.equal(made, w.float())


def multiply(x: Tensor, w: Tensor, packed: Tensor | None, bias: Any, residual: Any) -> Tensor:
    CALLS.append(packed is not None)
    return (x.float() @ (w.float() if packed is None else packed).T).to(x.dtype)


CALLS: list[bool] = []
WIDE = Layout(
    name="wide", version=1, weights=("w",), prepare=f"{__name__}:doubled", compare=f"{__name__}:same", worth=2.0
)  # fmt: skip
RECIPE = PythonRecipe(
    target=f"{__name__}:multiply", operands=("x", "w", "w.packed", "bias", "residual"), layout=WIDE
)  # fmt: skip


def test_a_python_function_gets_the_result_of_its_own_prepare(store: Store) -> None:
    linear, w = Served(RECIPE, "", {}), weight()
    CALLS.clear()
    for _ in range(3):
        assert linear.right(vector(), w)
    w.mul_(2)
    assert linear.right(vector(), w)
    assert CALLS == [False, True, True, False]


def test_a_layout_of_an_argument_that_is_no_weight_is_refused() -> None:
    with pytest.raises(BuildError, match="layout wide is for the weights x"):
        load(OP, replace(RECIPE, layout=replace(WIDE, weights=("x",))), "", {})


def test_a_packed_weight_that_does_not_pay_is_reported() -> None:
    made = Packed(operand=torch.zeros(1), layout=replace(WIDE, worth=0.9), bytes=95, plain_bytes=100, seconds=0.0)
    assert not made.pays and replace(made, bytes=90).pays
