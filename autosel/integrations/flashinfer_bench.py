"""Export decisions as a flashinfer-bench dataset, and unpack its solutions as sources to race.

    definitions/<name>.json   the op at one model's sizes; M, B, S and L are variable axes
    solutions/<name>.json     decided kernels with their sources: C++ behind a generated `run`, or PyTorch
    traces/<name>.jsonl       one line per decision: results of parity and race

The format follows flashinfer-bench 0.1's schema (Definition, Solution, Trace), and tests check it with its own parser.
A decision without a race (pinned by hand) has a solution and no trace, because nothing was measured.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosel import ops, resources
from autosel.candidates.torch import EAGER
from autosel.dispatch import recorded
from autosel.errors import BadConfig, UsageError
from autosel.files import read_named
from autosel.integrations.engines import folder as folders
from autosel.ledger.describe import contended
from autosel.native.compile import find_sources
from autosel.ops import eager
from autosel.ops.contract import Arg, Op
from autosel.values import (
    COUNT_DIMS,
    LENGTH_DIMS,
    Arm,
    Decision,
    Fingerprint,
    NativeRecipe,
    Passed,
    PythonRecipe,
    Workload,
    digest,
    from_json,
    parse_json,
)

AUTHOR = "autosel"
TAG, OF_DTYPE, OF_TRAITS = "autosel:op=", "autosel:dtype=", "autosel:traits="
DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
INT32, INT64 = "int32", "int64"

# Axes of each tensor, outputs included; `name:dtype` if it differs from the workload's.
SHAPES: Mapping[str, Mapping[str, str]] = {
    "linear": {"x": "M K", "w": "N K", "bias": "N", "residual": "M N", "y": "M N"},
    "attn": {"q": "B Hq S D", "k": "B Hkv L D", "v": "B Hkv L D", "lengths:int32": "B", "o": "B Hq S D"},
    "prefill_attn": {"q": "B Hq S D", "k": "B Hkv S D", "v": "B Hkv S D", "o": "B Hq S D"},
    "rmsnorm": {"x": "M d", "weight": "d", "y": "M d"},
    "add_rmsnorm": {"x": "M d", "residual": "M d", "weight": "d", "y": "M d", "new_residual": "M d"},
    "rope": {
        "q": "M Hq D",
        "k": "M Hkv D",
        "positions:int64": "M",
        "inv_freq:float32": "R2",
        "q_out": "M Hq D",
        "k_out": "M Hkv D",
    },
    "swiglu": {"gate": "M I", "up": "M I", "y": "M I"},
    "geglu": {"gate": "M I", "up": "M I", "y": "M I"},
    "norm_qkv": {"x": "M d", "norm_weight": "d", "w": "N d", "y": "M N"},
    "gate_up": {"x": "M d", "norm_weight": "d", "w_gate": "I d", "w_up": "I d", "y": "M I"},
    "lm_head": {"x": "M d", "w": "V d", "logits": "M V"},
}
OP_TYPE = {"linear": "gemm", "attn": "gqa_decode", "prefill_attn": "gqa_prefill", "lm_head": "gemm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    decision: Decision
    device: Fingerprint | None
    parity: Passed | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    definitions: int
    solutions: int
    traces: int
    left: tuple[str, ...]  # workloads that flashinfer-bench cannot express, with the reason


# --- export ----------------------------------------------------------------------------------------------------------


def export(decided: Iterable[Decided], folder: Path) -> Exported:
    """Write the complete dataset or nothing. Files of the same name are replaced; others in the folder stay."""
    files, made = documents(decided)
    folders.put(folder, files)
    return made


def documents(decided: Iterable[Decided]) -> tuple[dict[str, str], Exported]:
    """Return the dataset's files by name, and their contents."""
    definitions: dict[str, dict[str, Any]] = {}
    solutions: dict[str, dict[str, Any]] = {}
    traces: dict[str, list[dict[str, Any]]] = {}
    left = []
    for one in decided:
        d = one.decision
        why = unspeakable(d)
        if why:
            left.append(f"{d.workload.key}: {why}")
            continue
        name = definition_name(d.workload)
        definitions[name] = definition(d.workload)
        made = solution(d.workload, d.arm)
        solutions[made["name"]] = made
        if d.verdict is not None and one.parity is not None and d.arm.candidate in d.verdict.timings:
            traces.setdefault(name, []).append(trace(one, made["name"]))
    files = {f"definitions/{n}.json": json.dumps(d, indent=2) + "\n" for n, d in definitions.items()}
    files |= {f"solutions/{n}.json": json.dumps(d, indent=2) + "\n" for n, d in solutions.items()}
    files |= {f"traces/{n}.jsonl": "".join(json.dumps(t) + "\n" for t in lines) for n, lines in traces.items()}
    return files, Exported(
        definitions=len(definitions),
        solutions=len(solutions),
        traces=sum(map(len, traces.values())),
        left=tuple(left),
    )


def unspeakable(d: Decision) -> str:
    if d.op not in SHAPES:
        return "an op that writes its arguments, or draws"
    if d.workload.dtype not in DTYPE:
        return f"{d.workload.dtype} with its scales"
    if isinstance(d.arm.recipe, NativeRecipe) and not d.arm.recipe.source.startswith("cpu/"):
        return f"{d.arm.candidate} needs headers that a solution cannot carry"
    if isinstance(d.arm.recipe, PythonRecipe) and not d.arm.recipe.target.startswith(f"{EAGER}:"):
        return f"{d.arm.candidate} is not one file"
    return ""


def definition_name(w: Workload) -> str:
    """Return `rmsnorm_d4096_bf16`, without the dimensions that vary between calls."""
    sizes = [f"{n.lower()}{s}" for n, s in w.dims if n not in COUNT_DIMS | LENGTH_DIMS]
    traits = [f"{n}{value}" for n, value in w.traits]
    return re.sub(r"[^A-Za-z0-9_.]", "-", "_".join([w.op, *sizes, w.dtype, *traits]))


def definition(w: Workload) -> dict[str, Any]:
    op = ops.find(w.op)
    axes = {n: {"type": "var"} if n in COUNT_DIMS | LENGTH_DIMS else {"type": "const", "value": s} for n, s in w.dims}
    if w.op == "rope":
        axes["R2"] = {"type": "const", "value": w["R"] // 2}
        del axes["R"]
    return {
        "name": definition_name(w),
        "op_type": OP_TYPE.get(w.op, w.op),
        "tags": [f"{TAG}{w.op}", f"{OF_DTYPE}{w.dtype}", f"{OF_TRAITS}{json.dumps(dict(w.traits))}"],
        "description": (inspect.getdoc(inspect.getmodule(type(op))) or "").partition("\n\n")[0],
        "axes": axes,
        "inputs": {a.name: _spec(w, a) for a in _passed(op, w)},
        "outputs": {n: _output(w, n) for n in op.output_names},
        "reference": f"{inspect.getsource(eager)}\n\n{_python_run(op, w)}",
    }


def workload_of(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Workload | None:
    """Return the workload of an autosel definition at these sizes, None for other definitions. Raises BadConfig."""
    tags = [t for t in definition.get("tags") or () if isinstance(t, str)]
    found = {key: [t.removeprefix(key) for t in tags if t.startswith(key)] for key in (TAG, OF_DTYPE, OF_TRAITS)}
    if not found[TAG]:
        return None
    name = str(definition.get("name"))
    try:
        ((op_name,), (dtype,), (traits,)) = found.values()
        op = ops.OPS[op_name]
        sizes = axes if "R" not in op.dim_names else {**axes, "R": 2 * axes["R2"]}
        made: Workload = from_json(
            Workload,
            {
                "op": op_name,
                "dims": [[n, sizes[n]] for n in op.dim_names],
                "dtype": dtype,
                "traits": [[n, v] for n, v in parse_json(traits, what=name).items()],
            },
        )
    except (KeyError, ValueError, AttributeError) as error:
        raise BadConfig(f"{name} is not as autosel writes it", why=f"{error!s:.100}") from error
    recorded.refuse_unknown(made, Path(name))
    return made


def _passed(op: Op, w: Workload) -> list[Arg]:
    """Return the arguments that a caller gives, without optional tensors that this workload lacks and settings that it
    fixes."""
    fixed = {"scale", "max_len", *op.trait_defaults}
    given = {"lengths": bool(w.trait("ragged", False))}
    given |= {n: bool(w.trait(n, False)) for n in ("bias", "residual")}
    return [
        a
        for a in op.args
        if a.kind in ("tensor", "weight") or (given.get(a.name, False) if a.kind == "optional" else a.name not in fixed)
    ]


def _spec(w: Workload, arg: Arg) -> dict[str, Any]:
    if arg.kind in ("int", "float"):
        return {"shape": None, "dtype": "float32" if arg.kind == "float" else INT64}
    return _tensor(w, arg.name)


def _output(w: Workload, name: str) -> dict[str, Any]:
    if w.op == "lm_head" and w.trait("greedy", 0):
        return {"shape": ["M"], "dtype": INT64}
    return _tensor(w, name)


def _tensor(w: Workload, name: str) -> dict[str, Any]:
    for key, axes in SHAPES[w.op].items():
        found, _, dtype = key.partition(":")
        if found == name:
            return {"shape": axes.split(), "dtype": dtype or DTYPE[w.dtype]}
    raise AssertionError(f"{w.op} has no tensor {name}")


# --- solutions -------------------------------------------------------------------------------------------------------


def solution(w: Workload, arm: Arm) -> dict[str, Any]:
    """Return a solution in destination-passing style: `run(inputs..., outputs...)`."""
    op = ops.find(w.op)
    recipe = arm.recipe
    if isinstance(recipe, NativeRecipe):
        entry, language = "run.cpp::run", "cpp"
        root = resources.kernels()
        files = {path.relative_to(root).as_posix(): path.read_text() for path in find_sources(root / recipe.source)}
        files["run.cpp"] = _cpp_run(op, w, recipe, arm)
        spec = {"binding": "tvm-ffi", "target_hardware": ["cpu"], "dependencies": []}
    else:
        entry, language = "main.py::run", "python"
        function = recipe.target.partition(":")[2]
        files = {"main.py": f"{inspect.getsource(eager)}\n\n{_python_run(op, w, function, writes=True)}"}
        spec = {"target_hardware": ["cpu"], "dependencies": ["torch"]}
    made = {
        "definition": definition_name(w),
        "author": AUTHOR,
        "description": f"{arm.candidate}, knobs {dict(arm.knobs)}" + (f", flags {' '.join(recipe.flags)}"
                       if isinstance(recipe, NativeRecipe) else ""),
        "spec": {"language": language, "entry_point": entry, "destination_passing_style": True, **spec},
        "sources": [{"path": name, "content": text} for name, text in sorted(files.items())],
    }  # fmt: skip
    candidate = re.sub(r"[^A-Za-z0-9_.]", "-", arm.candidate)
    return {"name": f"autosel_{candidate}_{definition_name(w)}_{digest(made)[:8]}", **made}


def _cpp_run(op: Op, w: Workload, recipe: NativeRecipe, arm: Arm) -> str:
    """Return C++ source of `run`. autosel's entry takes every argument and the knobs; `run` takes the definition's
    arguments and fixes the rest."""
    types = {"int": "int64_t", "float": "double"}  # else a tensor
    given = [(types.get(a.kind, "TensorView"), a.name) for a in _passed(op, w)]
    given += [("TensorView", name) for name in op.output_names]
    parameters = ", ".join(f"{kind} {name}" for kind, name in given)
    values = _values(op, w, absent="Optional<TensorView>()", length="k.size(2)")
    knobs = [str(int(arm.knobs[n])) for n in recipe.knob_args]
    called = f"autosel::{recipe.entry}({', '.join([*values, *op.output_names, *knobs])})"
    dtype = next((f.removeprefix("-D") for f in recipe.flags if f.startswith("-DAUTOSEL_")), "")
    return (
        f"// {arm.candidate} as autosel decided it; compile with {' '.join(recipe.flags)}\n"
        + (f"#ifndef {dtype}\n#define {dtype}\n#endif\n" if dtype else "")
        + f'#include "{recipe.source}"\n\n'
        + "namespace {\nusing autosel::Optional;\nusing autosel::TensorView;\n\n"
        + f"void run({parameters}) {{\n  {called};\n}}\n"
        + "}  // namespace\n\nAUTOSEL_EXPORT(run, run);\n"
    )


def _values(op: Op, w: Workload, *, absent: str, length: str) -> list[str]:
    """Return the source of each argument of the op: its name if the definition has it, else its value. `absent` is that
    of a tensor, `length` that of the longest context."""
    passed = {a.name for a in _passed(op, w)}

    def value(arg: Arg) -> str:
        if arg.name in passed:
            return arg.name
        if arg.kind in ("tensor", "weight", "optional"):
            return absent
        if arg.name == "max_len":
            return length
        fixed = w.trait(arg.name, arg.default or 0)
        return repr(float(fixed) if arg.kind == "float" else int(fixed))

    return [value(arg) for arg in op.args]


def _python_run(op: Op, w: Workload, function: str = "", *, writes: bool = False) -> str:
    """Return Python source of `run` with the eager composition; a reference returns, a solution writes into its last
    arguments."""
    outs = list(op.output_names) if writes else []
    names = [*(a.name for a in _passed(op, w)), *outs]
    values = _values(op, w, absent="None", length="k.shape[2]")
    call = f"{function or w.op}({', '.join([*values, *outs])})"
    return f"def run({', '.join(names)}):\n    {'' if writes else 'return '}{call}\n"


# --- traces ----------------------------------------------------------------------------------------------------------


def trace(one: Decided, solution_name: str) -> dict[str, Any]:
    """Return the results of parity and race. Parity judges each element by its own bound, so there is no single
    absolute error: the schema's two fields are NaN, and the largest share of a bound is given in addition."""
    d, parity = one.decision, one.parity
    verdict = d.verdict
    assert verdict is not None and parity is not None
    op = ops.find(d.op)
    own, base = verdict.timings[d.arm.candidate], verdict.timings[d.baseline.candidate]
    name = definition_name(d.workload)
    inputs: dict[str, Any] = {a.name: {"type": "random"} for a in _passed(op, d.workload)}
    for a in _passed(op, d.workload):
        if a.kind in ("int", "float"):
            inputs[a.name] = {"type": "scalar", "value": a.default if a.default is not None else 0}
    axes = {n: s for n, s in d.workload.dims if n in COUNT_DIMS | LENGTH_DIMS}
    return {
        "definition": name,
        "workload": {"axes": axes, "inputs": inputs, "uuid": digest({"definition": name, "axes": axes})[:32]},
        "solution": solution_name,
        "evaluation": {
            "status": "PASSED",
            "environment": {
                "hardware": one.device.name if one.device else d.hw_id[:12],
                "libs": {k: str(v) for k, v in (one.device.environment if one.device else {}).items()},
            },
            "timestamp": d.created_at,
            "log": "; ".join(filter(None, (f"autosel decision {d.id}: {d.told}", contended(d)))),
            "correctness": {
                "max_relative_error": "NaN",
                "max_absolute_error": "NaN",
                "extra": {"worst_share_of_bound": parity.worst, "cases": parity.cases, "worst_case": parity.worst_case},
            },
            "performance": {
                "latency_ms": own.median_us / 1e3,
                "reference_latency_ms": base.median_us / 1e3,
                "speedup_factor": d.effect.median if d.effect else base.median_us / own.median_us,
            },
        },
    }


# --- import ----------------------------------------------------------------------------------------------------------

MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """Hold a solution's sources on disk, and the name of its entry for `autosel race --candidate`."""

    op: str
    target: str


def unpack(solution_file: Path, definition_file: Path, folder: Path) -> Unpacked:
    """Write a solution's sources into `folder`. Nothing of it runs here. Raises BadConfig, UsageError."""
    made, meant = _read(solution_file), _read(definition_file)
    if made.get("definition") != meant.get("name"):
        raise UsageError(
            f"{solution_file} solves {made.get('definition')!r:.60}", why=f"the definition is {meant.get('name')!r:.60}"
        )
    tags = [t.removeprefix(TAG) for t in meant.get("tags") or () if isinstance(t, str) and t.startswith(TAG)]
    if len(tags) != 1 or tags[0] not in ops.OPS:
        raise UsageError(
            f"{definition_file} is not one of autosel's ops",
            why=f"no one tag of it begins with {TAG}: argument order and bounds are not known",
            todo="race it by hand: autosel race OP --candidate FILE, with OP's arguments in order",
        )
    return Unpacked(op=tags[0], target=_unpacked(made, solution_file, folder))


def _unpacked(made: Mapping[str, Any], where: Path, folder: Path) -> str:
    spec, sources = made.get("spec"), made.get("sources")
    if not isinstance(spec, dict) or not isinstance(sources, list) or not sources:
        raise BadConfig(f"{where} is not a solution", why="it has no spec, or no sources")
    file, colons, symbol = str(spec.get("entry_point")).partition("::")
    if not colons or not symbol.isidentifier() or spec.get("language") not in ("python", "triton", "cpp", "cuda"):
        raise BadConfig(f"{where}: entry {spec.get('entry_point')!r:.60} in {spec.get('language')!r:.20}")
    files = {_inside(s, where): s["content"] for s in sources}
    if file not in files:
        raise BadConfig(f"{where}: its entry lies in {file!r:.60}, which it does not contain")
    folders.put(folder, files)
    return f"{folder / file}:{symbol}"


def _inside(source: Any, where: Path) -> str:
    """Return a path that stays within the folder."""
    ok = isinstance(source, dict) and isinstance(source.get("path"), str) and isinstance(source.get("content"), str)
    path = Path(source["path"]) if ok else Path("/")
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in str(path) or "\0" in str(path):
        raise BadConfig(f"{where}: a source's path leads elsewhere", why=repr(source)[:80])
    return str(path)


def _read(path: Path) -> dict[str, Any]:
    return parsed(read_named(path, MOST_BYTES), str(path))


def parsed(content: bytes, where: str) -> dict[str, Any]:
    """Return a document of a dataset. Raises BadConfig."""
    try:
        data = parse_json(content, what=where)
    except ValueError as error:
        raise BadConfig(f"{where} is not JSON", why=str(error)) from error
    if not isinstance(data, dict):
        raise BadConfig(f"{where} is not a flashinfer-bench document")
    return data


def proof_of(found: Sequence[tuple[Arm, Any]], arm: Arm) -> Passed | None:
    return next((p for a, p in found if a.digest == arm.digest and isinstance(p, Passed)), None)
