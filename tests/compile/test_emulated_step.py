"""Test the whole-step kernel on emulated threads with concurrent CTAs: the bits of single ops, and refusals."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from autosel.candidates.cuda import step as steps
from autosel.candidates.cuda.step import StepBuild, StepProgram
from autosel.fingerprint import known
from autosel.knobs.gpu.facts import facts
from autosel.knobs.gpu.persistent import persistent
from autosel.ops import OPS
from autosel.values import DTypeName, Knobs
from tests.compile.emulate import emulated, one_dtype

DTYPES: dict[DTypeName, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
D, HEADS, ROOM, LAYERS, VOCABULARY = 64, 2, 48, 2, 160
EPS = 1e-6
GEMV = (2, 1, 0)  # grid, split_k, pdl of the ops one by one


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of a step, and the features of its model family."""

    rows: int = 2
    group: int = 2
    width: int = 32
    qk_norm: bool = False
    sandwich: bool = False  # norms behind attention and feed-forward, and an offset in each
    interleaved: bool = False
    window: int = 0
    softcap: float = 0.0
    activation: int = 0
    split: int = 1
    chunk: int = 16

    @property
    def offset(self) -> float:
        return 1.0 if self.sandwich else 0.0


MODELS = {
    "llama": Model(),
    "qwen": Model(rows=1, group=4, qk_norm=True, split=2, chunk=48),
    "gemma": Model(rows=4, group=1, width=64, qk_norm=True, sandwich=True, window=9, softcap=20.0, activation=2),
    "wide": Model(rows=3, group=8, width=16, interleaved=True, activation=1, split=4, chunk=7),
}


class Scene:
    """Weights, caches and buffers of one model; every buffer is initially NaN."""

    def __init__(self, m: Model, dtype: DTypeName, seed: int = 3) -> None:
        self.m, self.dtype, draw = m, dtype, torch.Generator().manual_seed(seed)
        hq, torch_dtype = HEADS * m.group, DTYPES[dtype]

        def weights(*shape: int, scale: float = 0.0) -> Tensor:
            made = torch.randn(shape, generator=draw) * (scale or shape[-1] ** -0.5)
            return made.to(torch_dtype)

        self.q_width, self.kv_width = hq * m.width, HEADS * m.width
        self.table = weights(VOCABULARY, D, scale=1.0)
        names = {
            "qkv": (self.q_width + 2 * self.kv_width, D), "o": (D, self.q_width), "gate": (96, D), "up": (96, D),
            "down": (D, 96),
        }  # fmt: skip
        self.layers = [{n: weights(*shape) for n, shape in names.items()} for _ in range(LAYERS)]
        for layer in self.layers:
            for norm, size in (("n1", D), ("n2", D), ("p1", D), ("p2", D), ("qn", m.width), ("kn", m.width)):
                layer[norm] = weights(size, scale=0.3) + (0.0 if m.sandwich else 1.0)
            for cache in ("k", "v"):
                layer[cache] = weights(m.rows, HEADS, ROOM, m.width, scale=1.0)
        self.final, self.head = weights(D, scale=0.3) + 1.0, weights(VOCABULARY, D)
        self.tokens = torch.randint(VOCABULARY, (m.rows,), generator=draw)
        self.positions = torch.tensor([[20, 46, 3, 0][i] for i in range(m.rows)])
        self.inv_freq = 1.0 / (10000.0 ** (torch.arange(m.width // 2) / (m.width // 2)))
        for layer in self.layers:  # junk beyond the ends must not be read
            for row, position in enumerate(self.positions.tolist()):
                layer["k"][row, :, position + 1 :] = float("nan")
                layer["v"][row, :, position + 1 :] = float("inf")
        self.x, self.h, self.y = (self.empty(D) for _ in range(3))
        self.qkv, self.q = self.empty(self.q_width + 2 * self.kv_width), self.empty(self.q_width)
        self.o, self.f, self.logits = self.empty(self.q_width), self.empty(96), self.empty(VOCABULARY)

    def empty(self, n: int) -> Tensor:
        return torch.full((self.m.rows, n), float("nan"), dtype=DTYPES[self.dtype])

    @property
    def lengths(self) -> Tensor:
        return (self.positions + 1).to(torch.int32)

    def build(self) -> StepBuild:
        """Build with the settings of an H200's formula, except split and unroll."""
        m = self.m
        dims = {"B": m.rows, "Hq": HEADS * m.group, "Hkv": HEADS, "S": 1, "D": m.width, "L": ROOM}
        attn = OPS["attn"].workload(self.dtype, dims)
        smallest = OPS["linear"].workload(self.dtype, {"M": m.rows, "N": D, "K": 96})
        found = persistent(attn, smallest, facts(known.load("h200")))
        forced = {"split_k": m.split, "unroll": 2}
        knobs = Knobs(settings=tuple(dataclasses.replace(k, value=forced.get(k.name, k.value)) for k in found.settings))
        return StepBuild(dtype=self.dtype, knobs=knobs, recipe=steps.recipe(self.dtype, knobs, ()))

    def program(self) -> StepProgram:
        m, made = self.m, StepProgram(self.build())
        normed: dict[str, Any] = {"eps": EPS, "offset": m.offset}
        made.embed(self.tokens, self.table, self.x, scale=8.0)
        for w in self.layers:
            heads: dict[str, Any] = {"q_norm": w["qn"], "k_norm": w["kn"], **normed} if m.qk_norm else {}
            made.project(self.x, w["qkv"], self.qkv, norm=w["n1"], **normed)
            made.rotate(
                self.qkv, self.positions, self.inv_freq, self.q, w["k"], w["v"], interleaved=m.interleaved, **heads
            )
            scores: dict[str, Any] = {"window": m.window, "softcap": m.softcap, "chunk": m.chunk}
            made.attend(self.q, w["k"], w["v"], self.lengths, self.o, max_len=ROOM, **scores)
            self._join(made, self.o, w["o"], w["p1"], normed)
            made.project(self.x, w["gate"], self.f, norm=w["n2"], up=w["up"], activation=m.activation, **normed)
            self._join(made, self.f, w["down"], w["p2"], normed)
        made.norm(self.x, self.final, self.h, eps=EPS)
        made.project(self.h, self.head, self.logits)
        return made

    def _join(self, made: StepProgram, x: Tensor, w: Tensor, norm: Tensor, normed: dict[str, Any]) -> None:
        if self.m.sandwich:
            made.project(x, w, self.y)
            made.norm(self.y, norm, self.x, residual=self.x, **normed)
        else:
            made.project(x, w, self.x, residual=self.x)

    def bound(self, grid: int = 0, limit_us: int = 1_000_000) -> steps.BoundStep:
        build = self.build()
        macros = [flag.removeprefix("-D") for flag in build.recipe.flags]
        entry, check = (emulated("step", name, *macros) for name in ("step", "step_check"))
        return self.program().bound(entry, check, self.x, grid=grid, limit_us=limit_us)

    # --- the same, op by op ------------------------------------------------------------------------------------------

    def one_by_one(self) -> Tensor:
        """Run the step by the kernels for single ops."""
        m = self.m
        x = (self.table[self.tokens].float() * 8.0).to(self.x.dtype)
        for w in self.layers:
            qkv = self._call("norm_qkv", self.qkv, x, w["n1"], w["qkv"], EPS, m.offset)
            q, k, v = qkv.split([self.q_width, self.kv_width, self.kv_width], 1)
            q, k = q.reshape(m.rows, -1, m.width), k.reshape(m.rows, -1, m.width)
            if m.qk_norm:
                q, k = self._norm(q, w["qn"]), self._norm(k, w["kn"])
            q_out, k_out = torch.empty_like(q), torch.empty_like(k)
            inv_freq, style = self.inv_freq, int(m.interleaved)
            emulated("rope", "rope")(q, k, self.positions, inv_freq, style, q_out, k_out, 64, 2, 0)
            new = [t.reshape(m.rows, HEADS, 1, m.width).contiguous() for t in (k_out, v)]
            emulated("kv_append", "kv_append")(*new, self.positions.to(torch.int32), None, w["k"], w["v"], 2, 0)
            o = torch.empty_like(q_out)[:, :, None]
            emulated("attn_decode", "attn_decode", one_dtype(self.dtype))(
                q_out[:, :, None], w["k"], w["v"], self.lengths, ROOM, 0.0, m.window, m.softcap, o, 32, 2, m.chunk, 0
            )
            x = self._joined(o.reshape(m.rows, -1), w["o"], w["p1"], x)
            f = self._call("gate_up", self.f, x, w["n2"], w["gate"], w["up"], EPS, m.offset, m.activation)
            x = self._joined(f, w["down"], w["p2"], x)
        return self._call("gemv", self.logits, self._norm(x, self.final, 0.0), self.head, None, None)

    def _joined(self, y: Tensor, w: Tensor, norm: Tensor, x: Tensor) -> Tensor:
        if not self.m.sandwich:
            return self._call("gemv", x, y, w, None, x)
        y = self._call("gemv", x, y, w, None, None)
        wide = y.float()
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + EPS) * (norm.float() + self.m.offset)
        return (x.float() + normed).to(x.dtype)

    def _norm(self, x: Tensor, weight: Tensor, offset: float | None = None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(flat)
        offset = self.m.offset if offset is None else offset
        emulated("rmsnorm", "rmsnorm")(flat, weight, EPS, offset, out, 32, 2, 0)
        return out.reshape(x.shape)

    def _call(self, source: str, like: Tensor, *arguments: Any) -> Tensor:
        out = torch.empty_like(like)
        plan = (GEMV[0], self.m.split, GEMV[2])
        macros = ("AUTOSEL_ROWS=1", "AUTOSEL_UNROLL=4", one_dtype(self.dtype))
        emulated(source, source, *macros)(*arguments, out, *plan)
        return out


def check(scene: Scene, expected: Tensor) -> None:
    exact = scene.dtype != "fp32" and not scene.m.sandwich  # else other roundings
    if exact:
        assert torch.equal(scene.logits, expected)
    else:
        torch.testing.assert_close(scene.logits.float(), expected.float(), rtol=2e-2, atol=2e-2)


def in_every_dtype(name: str) -> list[tuple[str, DTypeName]]:
    return [(name, dtype) for dtype in DTYPES]


@pytest.mark.in_turns({name: partial(in_every_dtype, name) for name in MODELS}, label=" ".join, days=4)
def test_a_step_gives_the_bits_of_its_ops_one_by_one(choice: tuple[str, DTypeName]) -> None:
    """Run all dtypes with --every-target, else the dtype of the day."""
    name, dtype = choice
    expected = Scene(MODELS[name], dtype).one_by_one()
    for grid in (0, 1, 3):
        scene = Scene(MODELS[name], dtype)
        step = scene.bound(grid)
        step.run()
        assert step.stopped() == 0
        check(scene, expected)
        assert torch.isfinite(scene.logits.float()).all()


def test_steps_follow_each_other_and_counters_may_wrap_around() -> None:
    """Run several steps, because counters are not cleared: each step waits for its own multiple, also beyond 2^32."""
    scene = Scene(MODELS["llama"], "bf16")
    step = scene.bound(grid=3)
    step.run()
    first = scene.logits.clone()
    taken = 0xFFFFFFFF - 1
    here = [min(3, int(u)) for u in step.program[:, 2]]
    state = [0, taken, 0, *(taken * count for count in here)]
    step.state.copy_(torch.tensor([n % 2**32 for n in state], dtype=torch.int64).to(torch.int32))
    for _ in range(4):
        scene.logits.fill_(float("nan"))
        step.run()
        assert step.stopped() == 0
        assert torch.equal(scene.logits, first)  # the same token at the same position: the same step


def test_a_wait_that_cannot_end_is_stopped_and_nothing_runs_after_it() -> None:
    scene = Scene(MODELS["llama"], "bf16")
    step = scene.bound(limit_us=50)
    step.state[3 + 2] = -7  # as if seven CTAs of task 2 never finished
    step.run()
    assert step.stopped() == 1 + 3  # the task that waits for it
    scene.logits.fill_(7.0)
    step.run()
    assert (scene.logits == 7.0).all()


def test_a_grid_that_cannot_be_resident_is_refused() -> None:
    with pytest.raises(ValueError, match="5 CTAs, of which 4 can be resident at once"):
        Scene(MODELS["llama"], "bf16").bound(grid=5).run()


def test_a_token_outside_the_table_and_a_position_past_the_cache_access_no_memory() -> None:
    scene = Scene(MODELS["llama"], "bf16")
    scene.tokens[0], scene.positions[1] = VOCABULARY + 5, ROOM
    before = [layer["k"][1].clone() for layer in scene.layers]
    step = scene.bound()
    step.run()
    assert step.stopped() == 0
    for layer, kept in zip(scene.layers, before, strict=True):
        assert torch.equal(layer["k"][1].view(torch.int16), kept.view(torch.int16))


@pytest.mark.parametrize(
    ("task", "word", "value", "why"),
    [
        (0, 0, 9, "is of kind 9"),
        (1, 1, 5, "has 5 words"),
        (1, 2, 1, "units"),
        (1, 3, 9, "9 rows"),
        (1, 7, 8, "16-byte vectors"),
        (1, 6, 3, "split_k is 3"),
        (2, 8, 31, "heads of 31"),
        (3, 27, 2, "units"),
        (3, 26, 5, "splits"),
    ],
)
def test_a_program_that_the_build_cannot_run_is_refused_on_the_host(task: int, word: int, value: int, why: str) -> None:
    scene = Scene(MODELS["llama"], "bf16")
    macros = [flag.removeprefix("-D") for flag in scene.build().recipe.flags]
    words = scene.program().words().clone()
    emulated("step", "step_check", *macros)(words, scene.x)
    words[task, word] = value
    with pytest.raises(ValueError, match=why):
        emulated("step", "step_check", *macros)(words, scene.x)
