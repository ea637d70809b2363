"""Run decode steps of a patched model whole, where that is decided to be faster.

    whole = whole_of(model, codes)               # raises NotReplaceable with the reason
    output = whole.step(forward, args, kwargs)   # None: this call is the model's own

`autosel run --model DIR` decides the step of a batch and a bucket of context lengths: one native call runs it, or, if a
thread team is not faster, a list of ops, without the code of the model's modules. At the first step that is decided,
the weights move into one mapping on large pages. The parameters become views of it, so that prompts and whole steps
read the same memory. The first whole step of a batch is proven: its logits, and those of the model's own forward, must
be within the error that `autosel run` allows against a pass in higher precision.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autosel import devices, dispatch, fingerprint
from autosel.decode.cache import Cache, make_cache
from autosel.decode.model import Decoder
from autosel.decode.persistent import AnyStep, serve, write
from autosel.decode.question import OPS, TORCH, arms_of, chains_of, form_of, workload_of
from autosel.decode.reference import logits_after
from autosel.decode.rope import frequencies
from autosel.decode.run import WHOLE, StepForm
from autosel.decode.scene import judged
from autosel.decode.step import Place, Step, fresh_logits
from autosel.decode.team import MOST_ROWS, TeamStep, arm_of
from autosel.decode.weights import refuse_other_tensors, weights_of
from autosel.dispatch import Board
from autosel.errors import AutoselError, BadConfig, UsageError
from autosel.formats import PLAIN
from autosel.integrations.transformers.coded import Codes
from autosel.integrations.transformers.forward import CACHE_NAMES
from autosel.integrations.transformers.layer_format import told_format
from autosel.integrations.transformers.proof import Forward, NotReplaceable
from autosel.integrations.transformers.trials import StepTrials
from autosel.ledger.key import current_mode
from autosel.models.config import shape_of
from autosel.models.shape import ModelShape
from autosel.ops.stored import changes_of
from autosel.ops.weight import Weight
from autosel.values import Arm, Decision, DTypeName, Fingerprint, length_bucket

log = logging.getLogger(__name__)
READ = {"input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", *CACHE_NAMES}
IGNORED = {"return_dict", "cache_position"}  # the position is the cache's
PROJECTIONS = 7  # of a layer
BESIDE = ("weight_scale", "weight_shape")  # parameters of a layer that was dequantised from codes
LEAST_ROOM = 256  # tokens
TEAM, LIST = "by one native call", "as a list of ops"
BUCKETS = tuple(16 << n for n in range(17))  # a context in each bucket of lengths


def whole_of(model: nn.Module, codes: Mapping[str, Codes]) -> Whole:
    """Return what runs the model's whole steps; `codes` are those of its linear layers, by name. Raises
    NotReplaceable."""
    if "forward" in model.__dict__:
        raise NotReplaceable("the model's forward was replaced by other code, and is kept")
    if not devices.on_host(next(model.parameters()).device.type):
        raise NotReplaceable("whole steps of a patched model run on the CPU")
    try:
        shape = _described(model, codes)
        frequencies(shape, torch.device(devices.HOST))
        refuse_other_tensors(_Parameters(model, codes), shape)
    except (AutoselError, ValueError) as error:
        raise NotReplaceable(str(error).splitlines()[0]) from error
    if shape.window:
        raise NotReplaceable("layers with a sliding window keep another cache")
    return Whole(model=weakref.ref(model), shape=shape, codes=codes)


def _described(model: nn.Module, codes: Mapping[str, Codes]) -> ModelShape:
    """Return the dimensions of the model's configuration, with the format of its layers. Raises BadConfig,
    NotReplaceable."""
    config: Any = model.config
    told = config.to_dict() | {"architectures": [type(model).__name__], "dtype": str(next(model.parameters()).dtype)}
    for name in ("torch_dtype", "quantization_config"):
        told.pop(name, None)
    shape = shape_of(told, Path(config.name_or_path or type(model).__name__) / "config.json")
    format_ = _format_of_layers(model, shape, codes)
    return shape if format_ == PLAIN else replace(shape, weight=format_, table=PLAIN, stored=format_)


def _format_of_layers(model: nn.Module, shape: ModelShape, codes: Mapping[str, Codes]) -> str:
    """Return the format of the projections of every layer. Raises NotReplaceable for another one, and for a mix."""
    for name, module in model.named_modules():
        if name not in codes and (told := told_format(module)):
            raise NotReplaceable(f"{name} is a {type(module).__name__} in {told}")
    found = {name: held.weight.format.name for name, held in codes.items()}
    if not found:
        return PLAIN
    if len(set(found.values())) > 1 or len(found) != PROJECTIONS * shape.layers:
        names = ", ".join(sorted(set(found.values())))
        raise NotReplaceable(f"{len(found)} of its linear layers are in {names}: a step reads all layers in one format")
    return next(iter(found.values()))


# --- weights ---------------------------------------------------------------------------------------------------------


class _Parameters:
    """The model's parameters as a source of weights. A parameter that is read becomes a view of the copy; codes too."""

    described_by = "the model's configuration"

    def __init__(self, model: nn.Module, codes: Mapping[str, Codes]) -> None:
        self.held = {f"{name}.weight": held for name, held in codes.items()}
        beside = {f"{name}.{part}" for name in codes for part in BESIDE}
        self.entries: Mapping[str, Tensor] = {n: p for n, p in model.named_parameters() if n not in beside}
        self.place = Path(type(model).__name__)

    def read_into(self, name: str, out: Tensor) -> None:
        parameter = self.entries[name]
        if parameter.shape != out.shape:
            raise BadConfig(f"{name} is {list(parameter.shape)}", why=f"{self.described_by} says {list(out.shape)}")
        out.copy_(parameter)
        parameter.data = out.detach()

    def note(self, shape: ModelShape, dtype: str) -> str:
        return ""

    def codes(self, shape: ModelShape) -> Callable[[str, Weight], None] | None:
        return self._read_codes if self.held else None

    def _read_codes(self, name: str, out: Weight) -> None:
        held = self.held[name]
        if held.weight.shape != out.shape:
            raise BadConfig(f"{name} is {list(held.weight.shape)}", why=f"{self.described_by} says {list(out.shape)}")
        for part, own in zip(out.parts().values(), held.weight.parts().values(), strict=True):
            part.copy_(own)
        held.weight = out


Slot = tuple[Mapping[str, Any], str]  # a module's dictionary, and a name in it
Versions = tuple[list[int], list[int | None]]  # addresses, counts of changes in place
INACTIVE = "transformers.utils.output_capturing"  # its hooks act only in calls that ask for more than logits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unchanged:
    """Modules, hooks and parameters of a model, to notice that another module or tensor would run now."""

    modules: tuple[tuple[Slot, nn.Module], ...]
    forwards: tuple[tuple[Mapping[str, Any], Any], ...]  # attributes of each module, and its own forward or None
    hooks: tuple[Mapping[int, Any], ...]
    parameters: tuple[Slot, ...]
    versions: Versions

    @staticmethod
    def of(model: nn.Module) -> _Unchanged:
        modules = list(model.modules())
        parameters = tuple((m._parameters, name) for m in modules for name, _ in m.named_parameters(recurse=False))
        return _Unchanged(
            modules=tuple(((m._modules, name), child) for m in modules for name, child in m.named_children()),
            forwards=tuple((m.__dict__, m.__dict__.get("forward")) for m in modules),
            hooks=tuple(hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)),
            parameters=parameters,
            versions=_versions(parameters),
        )

    def __bool__(self) -> bool:
        return (
            all(hook.__module__ == INACTIVE for hooks in self.hooks if hooks for hook in hooks.values())
            and all(parent.get(name) is child for (parent, name), child in self.modules)
            and all(attributes.get("forward") is own for attributes, own in self.forwards)
            and self._same_parameters()
        )

    def _same_parameters(self) -> bool:
        """Compare addresses and counts of changes. To ask a tensor that has no count takes eight microseconds."""
        addresses, counts = self.versions
        found = [parent[name] for parent, name in self.parameters]
        return [p.data_ptr() for p in found] == addresses and all(
            changes_of(p) == count for p, count in zip(found, counts, strict=True) if count is not None
        )


def _versions(slots: tuple[Slot, ...]) -> Versions:
    """Return each parameter's address and count of changes in place."""
    found = [parent[name] for parent, name in slots]
    return [p.data_ptr() for p in found], [changes_of(p) for p in found]


# --- a call ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A call for one more token of each sequence, which all have the same length."""

    tokens: Tensor  # int64 [B]
    cache: Any  # transformers'
    held: int  # tokens in the cache


def _asked(shape: ModelShape, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Asked | None:
    """Return what the call asks for; None for any other call than a plain decode step of tokens that exist."""
    given: dict[str, Any] = {name: value for name, value in kwargs.items() if value is not None}
    if len(args) > 1 or any(value is not False for name, value in given.items() if name not in READ | IGNORED):
        return None
    if given.get("use_cache") is False or given.get("return_dict") is False:
        return None
    tokens = args[0] if args else given.get("input_ids")
    cache: Any = next((given[name] for name in CACHE_NAMES if name in given), None)
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.shape[1] != 1 or tokens.shape[0] > MOST_ROWS:
        return None
    if not devices.on_host(tokens.device.type) or not isinstance(given.get("logits_to_keep", 0), int):
        return None
    if _layers_of(cache, shape.layers) is None:
        return None
    if not all(0 <= token < shape.V for token in tokens[:, 0].tolist()):
        return None
    held = int(cache.get_seq_length())
    if held < 1 or not _sees_all(given.get("attention_mask"), held + 1):
        return None
    positions = given.get("position_ids")
    if positions is not None and bool((positions != held).any()):
        return None
    return _Asked(tokens=tokens[:, 0], cache=cache, held=held)


def _sees_all(mask: Any, length: int) -> bool:
    """Return True if each row sees exactly the first `length` tokens."""
    if mask is None:
        return True
    if not isinstance(mask, Tensor) or mask.shape[-1] < length:
        return False
    if mask.dim() == 2:
        return mask.shape[1] == length and bool(mask.all())
    seen = mask if mask.dtype == torch.bool else mask == 0
    return bool(seen[..., :length].all()) and not bool(seen[..., length:].any())


def _layers_of(cache: Any, count: int) -> list[Any] | None:
    """Return the layers of a plain dynamic or static cache that holds tokens in every layer."""
    from transformers import DynamicCache, StaticCache
    from transformers.cache_utils import DynamicLayer, StaticLayer

    kind = {DynamicCache: DynamicLayer, StaticCache: StaticLayer}.get(type(cache))
    layers = getattr(cache, "layers", [])
    if kind is None or len(layers) != count:
        return None
    plain = all(isinstance(x, kind) and not x.is_sliding and x.is_initialized for x in layers)
    return layers if plain else None


# --- the steps of one cache ------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Held:
    """Keys and values of transformers' cache, in tensors with room for more tokens.

    A static cache has such tensors. Those of a dynamic cache are replaced by views of larger ones.
    """

    layers: list[Any]
    cache: Cache
    static: bool
    shown: list[tuple[Tensor, Tensor]]  # the layers' tensors as they were left

    @staticmethod
    def of(cache: Any, shape: ModelShape, dtype: DTypeName, held: int) -> _Held:
        layers, static = cache.layers, hasattr(cache.layers[0], "max_cache_len")
        shown = [(layer.keys, layer.values) for layer in layers]
        rows, length = shown[0][0].shape[0], shown[0][0].shape[2]
        if static:
            made = Cache(rows=rows, room=length, page=0, k=[k for k, _ in shown], v=[v for _, v in shown])
            return _Held(layers=layers, cache=made, static=True, shown=shown)
        with torch.inference_mode(mode=False), torch.no_grad():
            made = make_cache(shape, dtype, rows=rows, room=held + max(LEAST_ROOM, held // 4))
        for k, v, (old_k, old_v) in zip(made.k, made.v, shown, strict=True):
            k[:, :, :held], v[:, :, :held] = old_k, old_v
        return _Held(layers=layers, cache=made, static=False, shown=shown)

    def fits(self, held: int) -> bool:
        """Return True if nobody else changed the cache and one more token has room."""
        same = all(x.keys is k and x.values is v for x, (k, v) in zip(self.layers, self.shown, strict=True))
        return same and held < self.cache.room

    def show(self, length: int) -> None:
        """Let transformers' cache hold the first `length` tokens."""
        if self.static:
            for layer in self.layers:
                layer.cumulative_length.fill_(length)
            return
        pairs = zip(self.cache.k, self.cache.v, strict=True)
        self.shown = [(k.narrow(2, 0, length), v.narrow(2, 0, length)) for k, v in pairs]
        for layer, (k, v) in zip(self.layers, self.shown, strict=True):
            layer.keys, layer.values = k, v


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """The step written for one cache, while a decision holds."""

    held: _Held
    place: Place
    step: AnyStep
    decision: Decision

    def continues(self, asked: _Asked, decision: Decision) -> bool:
        return decision is self.decision and self.place.longest == asked.held + 1 and self.held.fits(asked.held)


@dataclass(slots=True, kw_only=True)
class Whole:
    """The whole steps of one patched model."""

    model: weakref.ref[nn.Module]
    shape: ModelShape
    codes: Mapping[str, Codes]  # of the linear layers, by name
    unchanged: _Unchanged | None = None  # None: not patched yet
    decoder: Decoder | None = None
    refused: dict[str, str] = field(default_factory=dict)  # digest of a decided arm -> why it does not serve this model
    _sessions: weakref.WeakKeyDictionary[Any, _Session] = field(default_factory=weakref.WeakKeyDictionary)
    _proven: set[tuple[int, str]] = field(default_factory=set)  # (batch, digest of the arm)
    _known: dict[tuple[Any, ...], Decision | None] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def step(self, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of a decode step; None if the call runs the model's own `forward`."""
        model = self.model()
        asked = _asked(self.shape, args, kwargs)
        if model is None or asked is None or self._needs_own_code(model):
            return None
        decision = self.decided(len(asked.tokens), asked.held + 1)
        if decision is None:
            return None
        with torch.no_grad():
            session = self._sessions.get(asked.cache)
            if session is None or not session.continues(asked, decision):
                session = self._begun(model, asked, decision, forward, args, kwargs)
            if session is None:
                return None
            session.place.tokens.copy_(asked.tokens)
            session.step.run()
            session.step.settle()
            session.place.advance()
            session.held.show(asked.held + 1)
            dispatch.board().ran_whole(decision)
            return _output(session.step.logits[:, None].clone(), asked.cache)

    def begin(self) -> None:
        """Take the model as it is now for unchanged."""
        model = self.model()
        self.unchanged = _Unchanged.of(model) if model is not None else None

    def decided(self, batch: int, context: int) -> Decision | None:
        """Return the decision by which whole steps of this batch and context serve, in this process."""
        board: Board = dispatch.board()
        key = (id(board), board.digest, board.epoch, torch.get_num_threads(), batch, length_bucket(context))
        if key not in self._known:
            found = self._stored(batch, context)
            self._known[key] = found if isinstance(found, Decision) and _form_of(found) else None
        known = self._known[key]
        return None if known is None or known.arm.digest in self.refused else known

    def _stored(self, batch: int, context: int) -> Decision | str:
        """Return the decision about steps of this batch and context, or why it does not serve; "" without one."""
        workload = workload_of(self.shape, self.shape.dtype, batch, context)
        return dispatch.board().whole(workload, current_mode("team"))

    def told(self) -> str:
        """Return a line about the decisions of this model's steps."""
        steps = [(b, n) for b in range(1, MOST_ROWS + 1) for n in BUCKETS]
        found = [d for b, n in steps if (d := self.decided(b, n)) is not None]
        if not found:
            model: Any = self.model()
            command = f"`autosel run --model {model.config.name_or_path or 'DIR'} --seq N`"
            unfit = next((why for b, n in steps if isinstance(why := self._stored(b, n), str) and why), "")
            why = f" ({unfit})" if unfit else ""
            return f"decode steps run module by module{why}: {command} decides about whole ones"
        ways = {way: [d for d in found if (d.arm.candidate == OPS) == (way == LIST)] for way in (TEAM, LIST)}
        return "decode steps run whole, " + "; ".join(f"{way}: {_named(ds)}" for way, ds in ways.items() if ds)

    def _needs_own_code(self, model: nn.Module) -> bool:
        config: Any = model.config
        if model.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or not config.use_cache:
            return True
        return bool(config.output_attentions or config.output_hidden_states) or not self.unchanged

    # --- the first step of a cache, and of a bucket ------------------------------------------------------------------

    def _begun(
        self, model: nn.Module, asked: _Asked, decision: Decision, forward: Forward, args: Any, kwargs: Any
    ) -> _Session | None:
        """Write the step for a cache; prove it if it is the first of its kind. Return None if it cannot serve."""
        with self._lock:
            try:
                session = self._written(model, asked, decision)
                key = len(asked.tokens), decision.arm.digest
                if key not in self._proven:
                    self._prove(session, asked, forward(model, *args, **_on_a_copy(kwargs)).logits[:, -1])
                    self._proven.add(key)
            except AutoselError as error:
                self.refused[decision.arm.digest] = why = str(error).splitlines()[0]
                log.warning("decision %s does not serve this %s: %s", decision.id, type(model).__name__, why)
                return None
            self._sessions[asked.cache] = session
            return session

    def _written(self, model: nn.Module, asked: _Asked, decision: Decision) -> _Session:
        with torch.inference_mode(mode=False), torch.no_grad():
            decoder = self._adopted(model)
            held = _Held.of(asked.cache, self.shape, decoder.weights.dtype, asked.held)
            place = Place.at(asked.tokens, [asked.held] * len(asked.tokens))
            fp, form = fingerprint.take(devices.HOST), form_of(decision.arm.candidate)
            step, arm = (_listed if form == "ops" else _team)(decoder, held.cache, place, form, fp)
            if arm.digest != decision.arm.digest:
                raise BadConfig(f"{decision.arm.candidate} would run in another build or with other knobs than decided")
            return _Session(held=held, place=place, step=serve(step, fp, decision), decision=decision)

    def _adopted(self, model: nn.Module) -> Decoder:
        """Move the model's weights into one mapping, once."""
        if self.decoder is None:
            with torch.inference_mode(mode=next(model.parameters()).is_inference()), torch.no_grad():
                weights = weights_of(_Parameters(model, self.codes), self.shape, self.shape.dtype)
            self.decoder = Decoder(weights)
            self.begin()
        return self.decoder

    def _prove(self, session: _Session, asked: _Asked, own: Tensor) -> None:
        """Compare the step's logits and the model's own with a pass in higher precision. Raises BadConfig."""
        assert self.decoder is not None
        weights, cache, tokens = self.decoder.weights, session.held.cache, asked.tokens[:, None]
        wider = torch.float64 if weights.torch_dtype == torch.float32 else torch.float32
        exact = logits_after(weights, tokens, cache, asked.held, wider)
        pytorch = logits_after(weights, tokens, cache, asked.held, weights.torch_dtype)
        for who, logits in ("the model's own forward", own), ("the whole step", fresh_logits(session.step)):
            error, allowed = judged(logits, pytorch, exact, weights.dtype)
            if not error <= allowed:
                raise BadConfig(f"the logits of {who} are off by {error:.3g}; {allowed:.3g} is allowed")


def _form_of(decision: Decision) -> StepForm | None:
    """Return the form of a decided step; None if the model's own modules run it.

    Op by op is faster than modules, whose kernels are the same, if its race found it faster than PyTorch's own step.
    """
    form, verdict = form_of(decision.arm.candidate), decision.verdict
    if form in WHOLE:
        return form
    if form != "ops" or verdict is None or verdict.outcome == "undecided" or TORCH not in verdict.timings:
        return None
    return form if verdict.timings[OPS].median_us < verdict.timings[TORCH].median_us else None


def _team(decoder: Decoder, cache: Cache, place: Place, form: StepForm, fp: Fingerprint) -> tuple[AnyStep, Arm]:
    """Return the step of a thread team, and its arm; on plain weights, as in a run, if packed ones do not fit."""
    try:
        step = write(decoder, cache, place, form=form, fp=fp)
    except UsageError:
        if form != "packed":
            raise
        step = write(decoder, cache, place, form="whole", fp=fp)
    assert isinstance(step, TeamStep), "the CPU's whole steps are a thread team's"
    return step, arm_of(step.ops, fp, form)


def _listed(decoder: Decoder, cache: Cache, place: Place, form: StepForm, fp: Fingerprint) -> tuple[AnyStep, Arm]:
    """Return the step as a list of ops, in the chain with the fewest calls of PyTorch's, and its arm."""
    chains = chains_of(decoder, cache, place)

    def cost(step: Step) -> tuple[int, int]:
        return sum(getattr(c.function, "candidate", "").startswith("torch:") for c in step.calls), len(step.calls)

    best = min(chains.values(), key=cost)
    return write(decoder, cache, place, best.chain), arms_of(fp.kind, (), chains)[form]


def around_steps(original: Forward, whole: Whole | None) -> Forward:
    """Return the forward of a model whose decode steps run whole where that is decided, else as is fastest."""
    trials = StepTrials()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if whole is not None and whole.model() is self:  # not a copy of the model
            output = whole.step(original, args, kwargs)
            if output is not None:
                return output
        return trials(self, original, args, kwargs)

    return forward


def _on_a_copy(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with a copy of the cache."""
    return {n: copy.deepcopy(v) if n in CACHE_NAMES and v is not None else v for n, v in kwargs.items()}


def _named(decisions: Sequence[Decision]) -> str:
    found = ((d.workload["B"], *length_bucket(d.workload["L"])) for d in decisions)
    return ", ".join(f"batch {batch} at {low} to {high} tokens" for batch, low, high in found)


def _output(logits: Tensor, cache: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    name = next(name for name in CACHE_NAMES if name in CausalLMOutputWithPast.__dataclass_fields__)
    return CausalLMOutputWithPast(logits=logits, **{name: cache})
