"""The decoder: Llama, Mistral, Qwen3 and Gemma 3, each op by `best()`.

It is written once, as calls through a `Runner`. One runner executes them at once (prefill, several tokens per sequence,
ops that allocate). Another writes them as a flat list of (callable, arguments) with preallocated buffers (the decode
step). Rows are tokens, M = B * S of them: x[M, d]. An operand that is a string names a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from autosel.decode.cache import Cache
from autosel.decode.rope import frequencies
from autosel.decode.run import FUSED, Chain
from autosel.decode.weights import Weights
from autosel.models.workloads import ACTIVATION_CODE


class Runner(Protocol):
    """Runner of ops. `site` names the place in the step, and so the result's buffer; string operands name weights."""

    def __call__(self, op: str, site: str, *operands: Any) -> Any: ...

    def embed(self, table: str, tokens: Tensor, scale: float) -> Tensor: ...

    def packed(self, site: str, heads: Tensor) -> Tensor:
        """Return [M, H, D] as [M * H, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The tokens that one forward pass adds: S of each of B sequences, the first at `starts`.

    `lengths` (None for a single sequence, and in prefill) counts each sequence's tokens including these; `max_len` is
    the longest. `fresh` means that nothing came before, so attention needs no cache.
    """

    tokens: Tensor  # int64 [M]
    positions: Tensor  # int64 [M]
    starts: Tensor  # int32 [B]
    lengths: Tensor | None  # int32 [B]
    max_len: int
    rows: int
    fresh: bool = False

    @property
    def per_row(self) -> int:
        return self.tokens.shape[0] // self.rows


class Decoder:
    """Weights, rotation frequencies, and the order of the ops."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.shape = weights, weights.shape
        self.inv_freq = frequencies(weights.shape, weights.device)
        self.norm = (weights.shape.rms_eps, weights.shape.norm_offset)

    def hidden(self, run: Runner, batch: Batch, cache: Cache, chain: Chain = FUSED) -> Tensor:
        """Return [M, d] for tokens, normalised for the output head; their keys and values are then in the cache."""
        s = self.shape
        x, branch = run.embed("embedding", batch.tokens, s.embedding_scale), None
        for i in range(s.layers):
            qkv, x = self._project_qkv(run, i, x, branch, chain)
            o = self._attention(run, i, qkv, batch, cache)
            x, branch = self._leave(run, i, "o", o, x, "attn_post_norm", later=chain.mlp == "added")
            y, x = self._gated(run, i, x, branch, chain)
            x, branch = self._leave(run, i, "down", y, x, "mlp_post_norm", later=chain.attn == "added")
        if branch is not None:
            return run("add_rmsnorm", "attn add", branch, x, "norm", *self.norm, 0)[0]  # type: ignore[no-any-return]
        return run("rmsnorm", "norm", x, "norm", *self.norm)  # type: ignore[no-any-return]

    def logits(self, run: Runner, hidden: Tensor) -> Tensor:
        """Return [M, V] for [M, d]."""
        return run("lm_head", "logits", hidden, self.weights.head_name, 0)  # type: ignore[no-any-return]

    # --- a block's input ---------------------------------------------------------------------------------------------

    def _project_qkv(
        self, run: Runner, i: int, x: Tensor, branch: Tensor | None, chain: Chain
    ) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values [M, (Hq + 2 Hkv) D], and the residual stream."""
        if branch is None and chain.attn == "fused":
            return run("norm_qkv", "qkv", x, f"{i}.attn_norm", f"{i}.qkv", *self.norm), x
        h, x = self._normed(run, "attn", x, branch, f"{i}.attn_norm")
        return run("linear", "qkv", h, f"{i}.qkv", None, None), x

    def _gated(self, run: Runner, i: int, x: Tensor, branch: Tensor | None, chain: Chain) -> tuple[Tensor, Tensor]:
        """Return act(gate) * up [M, I], and the residual stream."""
        kind = ACTIVATION_CODE[self.shape.activation]
        if branch is None and chain.mlp == "fused":
            return run("gate_up", "gate_up", x, f"{i}.mlp_norm", f"{i}.gate", f"{i}.up", *self.norm, kind), x
        h, x = self._normed(run, "mlp", x, branch, f"{i}.mlp_norm")
        gate = run("linear", "gate", h, f"{i}.gate", None, None)
        up = run("linear", "up", h, f"{i}.up", None, None)
        if kind == 0:
            return run("swiglu", "gate_up", gate, up), x
        return run("geglu", "gate_up", gate, up, int(kind == 2)), x

    def _normed(self, run: Runner, site: str, x: Tensor, branch: Tensor | None, weight: str) -> tuple[Tensor, Tensor]:
        if branch is None:
            return run("rmsnorm", f"{site} norm", x, weight, *self.norm), x
        return run("add_rmsnorm", f"{site} add", branch, x, weight, *self.norm, 0)  # type: ignore[no-any-return]

    # --- a block's output --------------------------------------------------------------------------------------------

    def _leave(
        self, run: Runner, i: int, site: str, y: Tensor, x: Tensor, post_norm: str, *, later: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream, and what must still be added to it."""
        w = f"{i}.{site}"
        if self.shape.sandwich:
            made = run("linear", site, y, w, None, None)
            return run("add_rmsnorm", f"{site} sandwich", made, x, f"{i}.{post_norm}", *self.norm, 1)[1], None
        if later:
            return x, run("linear", site, y, w, None, None)
        return run("linear", site, y, w, None, x), None

    # --- attention ---------------------------------------------------------------------------------------------------

    def _attention(self, run: Runner, i: int, qkv: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Return [M, Hq D] for [M, (Hq + 2 Hkv) D]."""
        s, m = self.shape, qkv.shape[0]
        q, k, v = qkv.view(m, -1, s.D).split((s.Hq, s.Hkv, s.Hkv), 1)
        if s.qk_norm:
            q = run("rmsnorm", "q norm", run.packed("q", q), f"{i}.q_norm", *self.norm).view(m, s.Hq, s.D)
            k = run("rmsnorm", "k norm", run.packed("k", k), f"{i}.k_norm", *self.norm).view(m, s.Hkv, s.D)
        q, k = run("rope", "rope", q, k, batch.positions, self.inv_freq[i], s.rope.style)
        q, k, v = (t.view(batch.rows, batch.per_row, -1, s.D).transpose(1, 2) for t in (q, k, v))
        run("kv_append", "kv_append", k, v, batch.starts, cache.block_table, cache.k[i], cache.v[i])
        o = self._attend(run, i, q, k, v, batch, cache)
        return o.transpose(1, 2).reshape(m, s.Hq * s.D)

    def _attend(self, run: Runner, i: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, cache: Cache) -> Tensor:
        scale, window = self.shape.attn_scale, self.window(i, batch.max_len)
        if batch.fresh:
            return run("prefill_attn", "attn", q, k, v, scale, window, 0.0)  # type: ignore[no-any-return]
        past = (cache.k[i], cache.v[i])
        if cache.block_table is not None:
            lengths = batch.starts + batch.per_row if batch.lengths is None else batch.lengths
            return run(  # type: ignore[no-any-return]
                "paged_attn", "attn", q, *past, cache.block_table, lengths, batch.max_len, scale, window, 0.0
            )
        return run("attn", "attn", q, *past, batch.lengths, batch.max_len, scale, window, 0.0)  # type: ignore[no-any-return]

    def window(self, i: int, length: int) -> int:
        """Return layer i's window at a context of `length`; 0 if the context fits, which has another workload key."""
        window = self.shape.window if self.shape.layer_types[i] == "sliding" else 0
        return window if length > window else 0
