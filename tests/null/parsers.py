"""List every parser of outside data, with generated inputs: a case takes data, and must answer or refuse with a
message.

Each case is a strategy and a function of its value. The function raises nothing but AutoselError (checked here for
clear text); any other exception is a bug. Most documents are valid ones with one change, so that later checks are
reached too; digests are corrected, as a forger would do.
"""

from __future__ import annotations

import copy
import io
import json
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as terms
from hypothesis import strategies as st

from autosel import models, ops, resources, settings
from autosel.candidates import arms, registry, validity
from autosel.candidates.user import from_target
from autosel.cli import bundle
from autosel.cli.explain import explain_text
from autosel.cli.main import run
from autosel.cli.repro import script
from autosel.cli.tune import parse_budget
from autosel.decode.gguf import open_gguf
from autosel.decode.weights import _opened
from autosel.devices import store
from autosel.dispatch import resolve
from autosel.dispatch.board import _served, this_device
from autosel.errors import MOST_CHARACTERS, AutoselError, WorkerError
from autosel.fingerprint import known
from autosel.formats import PLAIN as PLAIN_FORMAT
from autosel.formats import find_weight_format
from autosel.guard import Held
from autosel.ledger import Ledger, faults, intake, open_ledger, snapshot
from autosel.ledger.commands import Import
from autosel.ledger.engine import Database
from autosel.ledger.key import current_mode, serving_key
from autosel.models.gguf import read_gguf
from autosel.ops.weight import empty
from autosel.parity.session import Called
from autosel.race.worker import Probed, Taken, Warmed
from autosel.values import (
    Arm,
    Decision,
    Effect,
    Fingerprint,
    Knobs,
    NativeRecipe,
    Rate,
    Timing,
    Verdict,
    digest,
    from_json,
    parse_json,
    to_json,
)
from autosel.workers import protocol
from autosel.workers.process import Exit, RaisedError, Worker
from tests import ggufs

MOST_TEXT = 3 * MOST_CHARACTERS + 2


@dataclass(frozen=True, slots=True)
class Parser:
    """Hold the values to draw, and the function to run on them in a separate folder."""

    drawn: st.SearchStrategy[Any]
    parse: Callable[[Any, Path], None]


def refused_in_words(parse: Callable[[], Any]) -> Any:
    """Return the answer, or None for a refusal in clear text."""
    refusal: AutoselError | None = None
    try:
        return parse()
    except AutoselError as error:
        refusal = error
    text = str(refusal)
    assert refusal.what.strip(), "the message is empty"
    assert len(text) <= MOST_TEXT, f"{len(text)} characters"
    assert "Traceback" not in text
    text.encode()
    odd = [c for c in text if not c.isprintable() and c != "\n"]
    assert odd == [], f"control characters: {odd!r}"
    return None


def answered(parse: Callable[[], Any], error: type[Exception]) -> tuple[Any, Exception | None]:
    """Return the answer and the refusal; one of them is None."""
    try:
        return parse(), None
    except error as refusal:
        return None, refusal


# --- what to draw -----------------------------------------------------------------------------------------------------

NUMBERS = st.integers() | st.sampled_from([0, -1, 2**31, 2**53, 2**63, 2**64, 10**400]) | st.floats()
TEXTS = st.text(max_size=12) | st.sampled_from(
    ["", "\0", "\x1b[2J", "..", "/", "~x", "nan", "-1", "\ud800", "x" * 9999]
)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
BYTES = st.binary(max_size=200) | st.sampled_from(
    [b"", b"\xff\xfe", b"[" * 99_999, b'{"a":' * 999, b"9" * 9999, b"1e999"]
)


def paths_of(data: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places in a document that can be changed."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [here] * bool(here) + [found for name, item in items for found in paths_of(item, (*here, name))]


@st.composite
def changed(draw: Any, document: Callable[[], Any]) -> Any:
    """Draw a valid document with up to three changes: another value, a missing or an additional entry."""
    data = copy.deepcopy(document())
    for _ in range(draw(st.integers(0, 3))):
        places = paths_of(data)
        if not places:
            break
        *way, last = draw(st.sampled_from(places))
        holder = data
        for name in way:
            holder = holder[name]
        what = draw(st.sampled_from(("other", "other", "gone", "more")))
        if what == "other":
            holder[last] = draw(PLAIN)
        elif what == "gone":
            del holder[last]
        elif isinstance(holder, dict):
            holder[draw(TEXTS)] = draw(PLAIN)
    return data


def as_json(data: Any) -> bytes:
    """Encode as Python does: with NaN, lone surrogates and all."""
    return json.dumps(data).encode()


# --- documents --------------------------------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip


@cache
def decision() -> Decision:
    """Return a decision that this device would serve, with a known and current arm."""
    w, device = ops.find("rmsnorm").workload("bf16", {"M": 1, "d": 512}), this_device()
    base = arms.arm(registry.baseline("rmsnorm"), w, device, "", Knobs())
    kernel = Arm(
        candidate="cpp:rmsnorm",
        backend="CPP",
        recipe=NativeRecipe(source="cpu/rmsnorm.cpp", entry="rmsnorm", flags=("-mavx2",), knob_args=("threads",)),
        knobs={"threads": 1},
        digest=digest({"source": "d" * 64, "knobs": {"threads": 1}}),
        build="d" * 64,
    )
    effect, timing = (
        Effect(median=2.0, lo=1.9, hi=2.1),
        Timing(median_us=1, lo_us=1, hi_us=1, p95_us=1, min_us=1, samples=9),
    )
    verdict = Verdict(
        outcome="promote", winner="cpp:rmsnorm", reason="won", effect=effect, timings={"cpp:rmsnorm": timing},
        next_best=("torch:rmsnorm", 2.0), e_values=(30.0,), wins=((14, 14),), roofline=0.5, read_bytes_per_s=1e9,
    )  # fmt: skip
    return Decision(
        id=41, state="promoted", hw_id=device.hw_id, op=w.op, bucket=w.bucket, mode=current_mode(), workload=w,
        arm=kernel, baseline=base, verdict=verdict, reason="won 42 of 42",
        created_at="2026-01-01T00:00:00.000000+00:00",
    )  # fmt: skip


def rows() -> list[dict[str, Any]]:
    d = decision()
    return [{"key": serving_key(d.hw_id, d.mode, d.bucket), "epoch": 7, "decision": to_json(d)}]


@st.composite
def bundles(draw: Any) -> bytes:
    """Draw a snapshot or export. Its digest is correct if its contents have one; usually its keys are too."""
    made = {"format": snapshot.FORMAT, "version": snapshot.VERSION, "epoch": 7, "rows": draw(changed(rows))}
    if draw(st.integers(0, 4)) == 0:
        made = draw(changed(lambda: made))
    if draw(st.booleans()):
        rekey(made)
    try:
        body = {name: made.get(name) for name in ("format", "version", "epoch", "rows")}
        return as_json({"digest": snapshot._digest(body), **made})
    except (ValueError, TypeError, RecursionError):  # contains something without a canonical spelling
        return as_json({"digest": "0" * 64, **made})


def rekey(made: Any) -> None:
    """Set each row's key, op and bucket from its contents, so that it passes that check."""
    for row in made["rows"] if isinstance(made.get("rows"), list) else ():
        try:
            d: Decision = from_json(Decision, row["decision"])
            row["decision"] |= {"op": d.workload.op, "bucket": d.workload.bucket}
            row["key"] = serving_key(d.hw_id, d.mode, d.workload.bucket, d.length_range)
        except (ValueError, KeyError, TypeError):
            continue


def fault() -> dict[str, Any]:
    found = faults.Fault(
        cause="kernel", reason="wrong", decision=decision(), workload=decision().workload.key, evidence={"row": 3},
        seen_at="2026-01-02T00:00:00.000000+00:00",
    )  # fmt: skip
    return to_json(found)


def fingerprint() -> Fingerprint:
    rates = {"read_bytes_per_s@1": Rate(value=1e10, unit="B/s", spread=0.1, source="probe")}
    return Fingerprint(kind="cpu", name="a CPU", identity={"model": "x", "cpus": 2}, environment={}, rates=rates)


# --- the parsers ------------------------------------------------------------------------------------------------------


def json_text(data: bytes, _: Path) -> None:
    found, refusal = answered(lambda: parse_json(data, what="it"), ValueError)
    if refusal is None:
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()


def config(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(data)
    shape = refused_in_words(lambda: models.load(str(folder / "config.json")))
    if shape is not None:
        assert models.step(shape)
        assert shape.weight_bytes() > 0


def quantised(drawn: tuple[dict[str, Any], dict[str, Any], bytes], folder: Path) -> None:
    """Read every matrix of a checkpoint whose scheme, header or data were changed, in the dtype and as codes."""
    scheme, header, data = drawn
    place = folder / "quantised"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_bytes(as_json({"quantization_config": scheme}))
    head = as_json(header)
    (place / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    found = refused_in_words(lambda: _opened(place))
    stored = getattr(getattr(found, "scheme", None), "format", PLAIN_FORMAT)
    read = None if found is None else found.codes(replace(models.PRESETS["llama-1b"], weight=stored))
    for name, entry in () if found is None else found.entries.items():
        if math.prod(entry.shape) > 1 << 16:
            continue
        out = torch.empty(entry.shape, dtype=torch.float32)
        refused_in_words(lambda name=name, out=out: found.read_into(name, out))  # type: ignore[misc]
        if read is not None and len(entry.shape) == 2:
            codes = empty(find_weight_format(stored), *entry.shape)
            refused_in_words(lambda name=name, codes=codes: read(name, codes))  # type: ignore[misc]


def gguf_file(data: bytes, folder: Path) -> None:
    path = folder / "model.gguf"
    path.write_bytes(data)
    found = refused_in_words(lambda: read_gguf(path))
    if found is None:
        return
    assert all(t.start + t.size <= len(data) for t in found.tensors.values())
    shape = refused_in_words(lambda: models.load(str(path)))
    if shape is not None:
        assert models.step(shape)
        refused_in_words(lambda: open_gguf(path))


def settings_of(drawn: tuple[dict[str, str], bytes], folder: Path) -> None:
    environment, file = drawn
    place = folder / "settings"  # parsers that run in this process use the folder as home
    place.mkdir(exist_ok=True)
    (place / "config.toml").write_bytes(file)

    def parse() -> Any:
        home = settings._home(environment)
        return settings.resolve(environment, settings._file(place / "config.toml"), home)

    found = refused_in_words(parse)
    if found is not None:
        for setting in settings.SETTINGS:
            value = found[setting.name].value
            assert value is None or isinstance(value, setting.kind)


def url(text: str, _: Path) -> None:
    made = refused_in_words(lambda: Database(text))
    if made is not None:
        assert made.name
        made.close()


def frames(data: bytes, _: Path) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        try:
            message, fds = protocol.receive(far, until=time.monotonic() + 10)
        except (protocol.ProtocolError, protocol.ClosedError):
            return
        assert isinstance(message, dict)
        assert fds == []


class Peer(Worker):
    """Hold the parent's end of a worker that sends anything; the connection is real, but there is no process."""

    def __init__(self, said: bytes) -> None:
        self.entry, self.exit, self._cause = "tests:none", None, ""
        self._ready, self._next_id, self._start_until = True, 1, time.monotonic() + 10
        self._control, self._far = socket.socketpair()
        self._far.sendall(said)
        self._far.shutdown(socket.SHUT_WR)

    def close(self) -> Exit:
        self._control.close()
        self._far.close()
        self.exit = self.exit or Exit(exit_code=0, signal=None, why="", stdout="", stderr="", escaped=0, left=0)
        return self.exit

    def _died(self, stage: str) -> WorkerError:
        self.close()
        return self._error(f"the worker ended during {stage}", "exit 0", False)


def reply(data: Any, _: Path) -> None:
    try:
        body = json.dumps(data).encode()
        peer = Peer(struct.pack("<I", len(body)) + body)
    except (ValueError, RecursionError, BlockingIOError):
        return
    with peer:
        answer, refusal = answered(lambda: peer.request({"do": "x"}, 10.0), WorkerError)
        if refusal is None:
            assert isinstance(answer, dict)
        elif not isinstance(refusal, RaisedError):
            assert refusal.cause in ("protocol", "exit 0")  # type: ignore[attr-defined]


TOLD = {"ns": {"a": [1.0, 2.0], "b": [3.0]}, "disturbed": ""}
KINDS = (Warmed, Taken, Probed, Called)


def told(data: Any, _: Path) -> None:
    """Draw a worker's answer in a race or a proof, which its candidate may have forged."""
    body = json.dumps({"id": 1, "ok": data}).encode()
    for kind in KINDS:
        if len(body) < protocol.MAX_BYTES:
            with Peer(struct.pack("<I", len(body)) + body) as peer:
                _, refusal = answered(partial(peer.told, kind, {"do": "x"}, 10.0), WorkerError)
                assert refusal is None or refusal.cause == "protocol"  # type: ignore[attr-defined]


def served(data: bytes, folder: Path) -> None:
    """Read a snapshot as a serving process does."""
    (folder / snapshot.FILE).write_bytes(data)
    (folder / snapshot.FILE).chmod(0o600)
    found = refused_in_words(lambda: snapshot.read(folder / snapshot.FILE))
    if found is None:
        return
    device, held = this_device(), Held([from_json(faults.Fault, fault())], this_device().hw_id)
    _served(found.rows, held)
    serving = resolve.index(found.rows, device, held)
    for row in found.rows:
        refused_in_words(lambda row=row: row.decision)
    op = ops.find("rmsnorm")
    what = resolve.resolve(op, decision().workload, serving)
    assert what.candidate == "torch:rmsnorm", "for an unknown build the baseline must serve"
    assert what.explain()


@cache
def ledger_in(folder: Path) -> Ledger:
    return open_ledger(home=folder / "ledger")


def imported(data: bytes, folder: Path) -> None:
    """Import a file, then show the imported rows with the verbs."""
    ledger = ledger_in(folder)
    before = len(ledger.history())
    hw_id = this_device().hw_id
    found = refused_in_words(
        lambda: ledger.write(Import(document=bundle.read(data, "the import").decisions, hw_id=hw_id))
    )
    if found is None:
        assert len(ledger.history()) == before, "a refused import changed the ledger"
        return
    for made in map(ledger.decision, (*found.served, *(number for number, _ in found.kept))):
        if isinstance(made.arm.recipe, NativeRecipe):
            assert validity.staleness(made), "the build does not exist here"
        evidence = ledger.evidence(made.id)
        refused_in_words(lambda evidence=evidence: explain_text(evidence))
        written = refused_in_words(lambda evidence=evidence: script(evidence))
        assert written is None, "an import must not serve code from data"


def journal(data: bytes, folder: Path) -> None:
    """Read a fault's file as serving processes do, and as a ledger does when it opens."""
    place = faults.folder(folder / "ledger")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = place / "one.json"
    path.write_bytes(data)
    path.chmod(0o600)
    refused_in_words(lambda: faults.read(path))
    held = Held([f for _, f in faults.pending(folder / "ledger") if isinstance(f, faults.Fault)], decision().hw_id)
    held.why(decision())
    intake.take_in(ledger_in(folder))
    for left in place.iterdir():
        left.unlink()


def stored_rates(data: bytes, _: Path) -> None:
    fp = fingerprint()
    path = store.path_of(fp.env_id)  # below AUTOSEL_HOME, which is the folder
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    found = store.read(fp.env_id)
    assert found is None or found.env_id == fp.env_id


def device_file(data: bytes, folder: Path) -> None:
    (folder / "device.json").write_bytes(data)
    found = refused_in_words(lambda: known.read(folder / "device.json"))
    assert found is None or found.hw_id


def value(data: Any, _: Path) -> None:
    """Run the decoder of values."""
    for kind in (Decision, Fingerprint, Verdict, Arm):
        found, refusal = answered(partial(from_json, kind, data), ValueError)
        if refusal is None:
            assert from_json(kind, to_json(found)) == found or b"NaN" in as_json(data)


def budget(text: str, _: Path) -> None:
    seconds = refused_in_words(lambda: parse_budget(text))
    assert seconds is None or 0 < seconds < float("inf")


def candidate(drawn: tuple[str, bytes], folder: Path) -> None:
    target, source = drawn
    (folder / "mykernels.py").write_bytes(source)
    found = refused_in_words(lambda: from_target(target, "rmsnorm", folder=folder))
    assert found is None or found.name.startswith("user:")


def command_line(words: list[str], _: Path) -> None:
    """Run a whole command line without measurements: an answer or a refusal, but never a bug of autosel."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(words)
    assert "bug in autosel" not in err.getvalue(), err.getvalue()
    assert code in (0, 1, 2, 3, 4, 5), code
    if code:
        assert err.getvalue().startswith(("error: ", "undecided: ")) or words[0] == "doctor", err.getvalue()


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12) | st.sampled_from(
    ["", "-", "--", "--help", "0", "-1", "1", "4096", "8192", "1048577", "9" * 30, "1e3", "٣", "nan", "bf16", "attn",
     "gemv", "llama-8b", "h200", "cpu", "cuda:0", "a:b", "../x", "~nobody", "x" * 5000, "%s", "{}", "\x1b[2J",
     "1h", "\n"]
)  # fmt: skip
OPTIONS = {
    "knobs": ("--model", "--op", "--dtype", "--batch", "--seq", "--explain", "--json"),
    "best": ("--workload", "--json"),
    "explain": ("--id", "-n", "--history", "--json"),
    "decide": ("--reason", "--promote", "--pin", "--demote", "--release", "--json"),
    "db": ("--reason", "--json"),
    "import": ("--json",),
}
FLAGS = ("--json", "--explain", "--history", "--demote", "--release")
NEVER_MEASURES = {"tune": ["--device", "none"], "race": ["--model", "nowhere/none"], "knobs": ["--fingerprint", "l4"]}


@st.composite
def command_lines(draw: Any) -> list[str]:
    verb = draw(st.sampled_from([*OPTIONS, "tune", "race"]))
    known_options = OPTIONS.get(verb, ("--batch", "--seq", "--dtype", "--op", "--budget", "--case", "--seed", "--json"))
    words = [verb, *NEVER_MEASURES.get(verb, ())]
    if verb == "race":
        words += [draw(WORDS), "--candidate", draw(WORDS)]
    elif verb == "db":
        words.append(draw(st.sampled_from(["release", "info", "check", "none"])))
    for _ in range(draw(st.integers(0, 4))):
        option = draw(st.sampled_from(known_options))
        words += [option] if option in FLAGS else [option, draw(WORDS)]
    words += draw(st.lists(WORDS, max_size=2))
    return words


TOML = st.one_of(
    BYTES,
    st.text(max_size=80).map(lambda text: text.encode(errors="replace")),
    st.dictionaries(
        st.sampled_from([s.name for s in settings.SETTINGS]) | st.text(max_size=6),
        st.sampled_from(["1", "-1", "true", '"full"', "1e999", "nan", "[1]", "{a=1}", "2020-01-01", "9" * 5000,
                         '"~nobody"', '"\\u0000"', "[" * 5000, '""', "0x7f"]),
        max_size=3,
    ).map(lambda d: "\n".join(f"{json.dumps(k)} = {v}" for k, v in d.items()).encode(errors="replace")),
)  # fmt: skip
ENVIRONMENTS = st.dictionaries(
    st.sampled_from([s.variable for s in settings.SETTINGS]),
    st.text(st.characters(exclude_characters="\0"), max_size=12)
    | st.sampled_from(["1", "full", "on", "1e999", "-1", "~nobody/x", "~", "nan", "9" * 9999, "\udcff"]),
    max_size=3,
)
FAST = b"def fast(x, weight, eps, offset): ..."
SOURCES = st.binary(max_size=60) | st.sampled_from(
    [
        FAST,
        b"fast = 1",
        b"import autosel\n@autosel.candidate('rmsnorm', name=3)\ndef fast(x): ...",
        b"@candidate(dtypes=[1])\n" + FAST,
        b"@candidate(name='\\ud800')\n" + FAST,
        b"@candidate(name=" + b"[" * 150 + b"]" * 150 + b")\n" + FAST,
        b"# coding: nonsense\n",
        b"\0",
        b"\xff",
        b"(" * 500,
        b"x = " + b"-" * 9999 + b"1",
    ]
)

GGUF = ggufs.gguf(
    {
        "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64,
        "llama.embedding_length": 32, "llama.feed_forward_length": 8, "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "x": ["a", ""], "y": [1, 2], "z": True,
    },
    [
        ggufs.Stored("token_embd.weight", (2, 32), "Q8_0", bytes(68)),
        ggufs.Stored("rope_freqs.weight", (8,), "F32", struct.pack("<8f", *[1.0] * 8)),
        ggufs.Stored("output_norm.weight", (32,), "F32", bytes(128)),
    ],
)  # fmt: skip


@st.composite
def ggufs_changed(draw: Any) -> bytes:
    """Draw a GGUF file with up to three places overwritten, possibly cut or lengthened."""
    data = bytearray(GGUF)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        width = draw(st.sampled_from([1, 4, 8]))
        number = draw(st.integers(0, 255) | st.sampled_from([1 << 31, 1 << 60, (1 << 64) - 1]))
        data[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(data[: draw(st.sampled_from([None, None, 24, 200, -1, -33]))]) + bytes(
        draw(st.sampled_from([0, 0, 64]))
    )


SCHEMES = (
    lambda: {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True, "lm_head": False},
    lambda: {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "gemm"},
    lambda: {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"g": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32,
            "actorder": "group",
        }}},
    },
)  # fmt: skip
PARTS = (
    {"qweight": ("I32", [8, 8]), "qzeros": ("I32", [2, 1]), "scales": ("F16", [2, 8]), "g_idx": ("I32", [64])},
    {"qweight": ("I32", [64, 1]), "qzeros": ("I32", [2, 1]), "scales": ("F16", [2, 8])},
    {"weight_packed": ("I32", [8, 8]), "weight_scale": ("F16", [8, 2]), "weight_zero_point": ("I32", [1, 2]),
     "weight_g_idx": ("I32", [64]), "weight_shape": ("I64", [2])},
)  # fmt: skip
SIZES = {"I32": 4, "F16": 2, "I64": 8}


def in_order(scheme: dict[str, Any]) -> None:
    """Change a scheme to groups of neighbours along a row."""
    scheme.update({"desc_act": False} if "desc_act" in scheme else {})
    for group in scheme.get("config_groups", {}).values():
        del group["weights"]["actorder"]


def header_of(parts: Mapping[str, tuple[str, list[int]]]) -> dict[str, Any]:
    """Return the header of a file with these tensors, one after the other."""
    at, made = 0, {}
    for name, (dtype, shape) in parts.items():
        end = at + SIZES[dtype] * math.prod(shape)
        made[f"model.layers.0.mlp.up_proj.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    return made


@st.composite
def checkpoints_in_codes(draw: Any) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Draw scheme, header and data of a checkpoint; shapes are exchanged so that a header still fits its file."""
    kind = draw(st.integers(0, 2))
    parts = dict(PARTS[kind])
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(parts)))
        shape = parts[name][1]
        parts[name] = (
            parts[name][0],
            draw(st.sampled_from([shape[::-1], [math.prod(shape)], [1, *shape], [0, 8], []])),
        )
    if draw(st.booleans()):
        parts.pop(draw(st.sampled_from(sorted(parts))))
    header = header_of(parts)
    size = max((end["data_offsets"][1] for end in header.values()), default=0)
    data = draw(st.binary(min_size=size, max_size=size) | st.just(bytes(size)) | st.just(b"\x01" * size))
    changes = draw(st.integers(0, 3))
    scheme = SCHEMES[kind]()
    if draw(st.booleans()):  # codes of neighbours are read as they are
        in_order(scheme)
    scheme = draw(changed(lambda: scheme)) if changes == 1 else scheme
    return scheme, draw(changed(lambda: header)) if changes == 2 else header, data


URLS = st.sampled_from(["sqlite:///", "sqlite:////x?y=z", "postgresql://h:x/y", "postgresql://h:99999999/y", "a+b://"])
REPLIES = (lambda: {"id": 1, "ok": {"ns": {"a": [1.0]}}}), (lambda: {"id": 1, "error": {"type": "x", "message": "y"}})
TARGETS = st.sampled_from(["mykernels:fast", "mykernels:fast.x", "a.b:c", "sys:x", "os.path:join", "mykernels:"])
KNOWN_DEVICE = json.loads((resources.fingerprints() / "h200.json").read_text())

PARSERS: Mapping[str, Parser] = {
    "json": Parser(BYTES | PLAIN.map(as_json), json_text),
    "value": Parser(changed(lambda: to_json(decision())), value),
    "config.json": Parser(BYTES | changed(lambda: CONFIG).map(as_json), config),
    "quantised": Parser(checkpoints_in_codes(), quantised),
    "gguf": Parser(BYTES | BYTES.map(b"GGUF".__add__) | ggufs_changed(), gguf_file),
    "settings": Parser(st.tuples(ENVIRONMENTS, TOML), settings_of),
    "database url": Parser(TEXTS | URLS | st.text(max_size=8).map("postgresql://{}".format), url),
    "frame": Parser(BYTES | BYTES.map(lambda body: struct.pack("<I", len(body)) + body), frames),
    "reply": Parser(st.one_of(*map(changed, REPLIES)), reply),
    "told": Parser(changed(lambda: TOLD), told),
    "decisions.json": Parser(bundles(), served),
    "import": Parser(bundles(), imported),
    "fault": Parser(BYTES | changed(fault).map(as_json), journal),
    "rates": Parser(BYTES | changed(lambda: to_json(fingerprint())).map(as_json), stored_rates),
    "device file": Parser(BYTES | changed(lambda: KNOWN_DEVICE).map(as_json), device_file),
    "budget": Parser(TEXTS | st.from_regex(r"(\d{1,3}h)?(\d{1,400}m)?\d*(\.\d*)?s?", fullmatch=True), budget),
    "candidate": Parser(st.tuples(TEXTS | TARGETS, SOURCES), candidate),
    "command line": Parser(command_lines(), command_line),
}


# --- feeding --------------------------------------------------------------------------------------------------------


@contextmanager
def empty_home(folder: Path) -> Iterator[Path]:
    """Provide an empty home temporarily."""
    patch = pytest.MonkeyPatch()
    for name in [n for n in os.environ if n.startswith("AUTOSEL_")]:
        patch.delenv(name)
    patch.setenv("AUTOSEL_HOME", str(folder))
    settings.read.cache_clear()
    try:
        yield folder
    finally:
        patch.undo()
        settings.read.cache_clear()


def feed(parser: Parser, folder: Path, examples: int) -> None:
    """Feed a parser this many drawn values: each is answered, or refused with a message."""

    @terms(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        parser.parse(data.draw(parser.drawn), folder)

    fuzz()
