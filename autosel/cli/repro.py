"""Write one decision's race as a single file that needs only torch, and a C++ compiler if the winner is a kernel.

The script contains the sources of kernel and baseline, the shapes, and the distribution of each operand. It draws
operands, compares the two results, and times both arms in coin-flipped pairs on cold operands, as the race did.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

from autosel import devices, resources, settings
from autosel.errors import UsageError
from autosel.ledger.describe import contended
from autosel.ledger.store import Evidence
from autosel.native.compile import find_sources
from autosel.values import SERVING, WHOLE_STEP, Arm, Decision, NativeRecipe, Workload
from autosel.version import __version__

LLC_FALLBACK_BYTES = 32 << 20


def script(evidence: Evidence) -> str:
    """Return the script's text. Raises UsageError for a decision that no script can reproduce."""
    refuse_irreproducible(evidence)
    d, fp = evidence.decision, evidence.fingerprint
    facts = {
        "decision": d.id,
        "candidate": d.arm.candidate,
        "baseline": d.baseline.candidate,
        "workload": d.workload.key,
        "device": fp.name if fp else "unknown",
        "measured": _measured(evidence),
        "autosel": __version__,
        "llc_bytes": int(fp.identity.get("l3_bytes", LLC_FALLBACK_BYTES)) if fp else LLC_FALLBACK_BYTES,
        "arguments": _arguments(d.workload),
        "outputs": _outputs(d.workload),
        "arm": _arm(d.arm),
        "baseline_function": _function(d.baseline),
    }
    sources = _sources(d.arm.recipe.source) if isinstance(d.arm.recipe, NativeRecipe) else {}
    eager = (Path(__file__).parents[1] / "ops" / "eager.py").read_text()
    return _TEMPLATE.format(
        title=f"{d.arm.candidate} against {d.baseline.candidate} at {d.workload.key}: decision {d.id}",
        facts=json.dumps(facts, indent=1).replace("null", "None").replace("true", "True").replace("false", "False"),
        sources=json.dumps({name: _packed(text) for name, text in sources.items()}, indent=1),
        eager=json.dumps(_packed(eager)),
    )


def refuse_irreproducible(evidence: Evidence) -> None:
    """Raise UsageError for an arm that does not fit in a file (a user's, torch.compile), and for a decision without a
    race here: an imported decision is data, which is never turned into code.
    """
    d, fp, recipe = evidence.decision, evidence.fingerprint, evidence.decision.arm.recipe
    what, race_it = f"decision {d.id}", f"race it again: {again(d)}"
    serves = f"{what} serves {d.arm.candidate}"
    if evidence.race is None:
        todo = f"{settings.spelling()} explain --id {d.id}"
        raise UsageError(f"{what} has no race in this ledger, so it cannot be reproduced", why=d.reason, todo=todo)
    if d.op == WHOLE_STEP:
        why = "a model's weights do not go into one file"
        todo = f"{settings.spelling()} run --force, with that model, --seq and --batch: whole steps race again"
        raise UsageError(f"{what} is about whole decode steps", why=why, todo=todo)
    if fp is not None and not devices.on_host(fp.kind):
        raise UsageError(f"{what} was made on a GPU", why="the script's clock is a CPU's", todo=race_it)
    if not (d.workload.weight_format.plain and d.workload.cache_format.plain):
        why = "the script draws plain operands only"
        raise UsageError(f"{what} is about {d.workload.key}", why=why, todo=race_it)
    if recipe.layout is not None:
        why = "the script calls kernels on plain operands only"
        raise UsageError(f"{serves}, which reads weights in the layout {recipe.layout.name}", why=why, todo=race_it)
    if not isinstance(recipe, NativeRecipe) and not recipe.target.startswith("autosel.ops.eager:"):
        todo = "race it again instead: autosel race OP --candidate module:function"
        raise UsageError(f"{serves}, which is not autosel's own code", todo=todo)


def again(d: Decision) -> str:
    """Return the command that races the decision's winner again at its workload, on the CPU or the first GPU."""
    w = d.workload
    dims = ".".join(f"{name}{size}" for name, size in w.dims)
    words = f"race {w.op} --candidate {d.arm.candidate} --shape {dims} --dtype {w.dtype}"
    recipe = d.arm.recipe
    on_cpu = isinstance(recipe, NativeRecipe) and recipe.source.startswith("cpu/")
    return f"{settings.spelling()} {words}{'' if on_cpu else ' --device cuda'}"


def _measured(evidence: Evidence) -> str:
    d = evidence.decision
    v = d.verdict
    if v is None or v.effect is None:
        return "nothing was measured"
    since = "" if d.standing else f"; {d.told} since" if d.state not in SERVING else "; another arm by hand since"
    beside = f"; {contended(d)}" if contended(d) else ""
    return f"{v.effect.median:.3f}x ({v.effect.lo:.3f} .. {v.effect.hi:.3f}) on {d.created_at[:10]}{since}{beside}"


def _packed(text: str) -> str:
    return base64.b85encode(zlib.compress(text.encode(), 9)).decode()


def _sources(source: str) -> dict[str, str]:
    """Return the kernel and all headers that it includes, by their paths below kernels/."""
    root = resources.kernels()
    return {path.relative_to(root).as_posix(): path.read_text() for path in find_sources(root / source)}


def _arm(arm: Arm) -> dict[str, Any]:
    if isinstance(arm.recipe, NativeRecipe):
        knobs = [arm.knobs[name] for name in arm.recipe.knob_args]
        recipe = arm.recipe
        return {"source": recipe.source, "entry": recipe.entry, "flags": list(recipe.flags), "knobs": knobs}
    return {"function": _function(arm)}


def _function(arm: Arm) -> str:
    assert not isinstance(arm.recipe, NativeRecipe)
    return arm.recipe.target.partition(":")[2]


def _arguments(w: Workload) -> list[dict[str, Any]]:
    """Describe how to draw each argument: shape, dtype and spread; small tensors by value."""
    import torch

    from autosel.ops import find

    op = find(w.op)
    inputs = op.inputs(w, 1)
    described = []
    for arg in op.args:
        value = inputs[arg.name]
        entry: dict[str, Any] = {"name": arg.name, "role": arg.role}
        if not isinstance(value, torch.Tensor):
            entry["value"] = value
        else:
            entry |= {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
            few = value.flatten()[:100_000].double()
            if not value.is_floating_point():
                entry["range"] = [int(value.min()), int(value.max())] if value.numel() else [0, 0]
            elif value.numel():
                entry["mean"], entry["std"] = float(few.mean()), float(few.std(correction=0))
            if value.numel() <= 4096:
                entry["exactly"] = value.tolist()
        described.append(entry)
    return described


def _outputs(w: Workload) -> list[dict[str, Any]]:
    from autosel.ops import find
    from autosel.ops.contract import DTYPE

    op = find(w.op)
    inout = {a.name for a in op.args if a.role == "inout"}
    return [
        {"name": s.name, "shape": list(s.shape), "dtype": str(DTYPE.get(s.dtype, s.dtype)).removeprefix("torch.")}
        for s in op.outputs(w)
        if s.name not in inout
    ]


_TEMPLATE = '''#!/usr/bin/env python3
"""{title}.

Needs torch, and g++ (or $CXX) where the candidate is a kernel. Written by `autosel export --repro`.

    python THIS_FILE [--pairs 30]

Draws operands, compares the two results, then times both in pairs of coin-flipped order, operands cold.
"""

import argparse
import base64
import ctypes
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib

import torch

FACTS = {facts}
SOURCES = {sources}
EAGER = {eager}


def unpack(text):
    return zlib.decompress(base64.b85decode(text)).decode()


class NativeView(ctypes.Structure):
    """Same layout as TensorView in plain_c.h."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("ndim", ctypes.c_int64), ("shape", ctypes.c_int64 * 8),
        ("stride", ctypes.c_int64 * 8), ("code", ctypes.c_int64), ("bits", ctypes.c_int64),
    ]


def view(t):
    codes = {{torch.bfloat16: 4, torch.uint8: 1, torch.float8_e4m3fn: 10}}  # DLPack's numbers
    code = codes.get(t.dtype, 2 if t.is_floating_point() else 0)
    made = NativeView(t.data_ptr(), t.dim(), code=code, bits=8 * t.element_size())
    made.shape[: t.dim()], made.stride[: t.dim()] = t.shape, t.stride()
    return made


def build(arm):
    """Build the kernel and return it as f(*arguments, *outputs)."""
    folder = tempfile.mkdtemp(prefix="autosel-repro-")
    for name, text in SOURCES.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(unpack(text))
    library = os.path.join(folder, "kernel.so")
    command = [
        os.environ.get("CXX", "g++"), "-std=c++17", "-O3", "-fno-math-errno", "-Wno-psabi", "-fPIC", "-shared",
        "-pthread", "-DAUTOSEL_PLAIN_C", *arm["flags"], os.path.join(folder, arm["source"]), "-o", library, "-ldl",
    ]
    print(" ".join(command), file=sys.stderr)
    subprocess.run(command, check=True)
    entry = getattr(ctypes.CDLL(library), "autosel_" + arm["entry"])
    entry.restype = ctypes.c_char_p

    def prepared(*values):
        """Convert the operands once, before the timed call: ctypes is slow."""
        kept, pointers = [], (ctypes.c_void_p * (len(values) + len(arm["knobs"])))()
        for i, value in enumerate([*values, *arm["knobs"]]):
            if value is None:
                continue
            held = view(value) if isinstance(value, torch.Tensor) else (
                ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(value))
            kept += [held, value]
            pointers[i] = ctypes.cast(ctypes.pointer(held), ctypes.c_void_p)

        def call(_kept=kept):
            error = entry(pointers)
            if error:
                raise RuntimeError(error.decode())
        return call

    return prepared


def python_function(name):
    scope = {{}}
    exec(unpack(EAGER), scope)
    function = scope[name]
    return lambda *values: lambda: function(*values)


def draw(entry, seed):
    if "value" in entry:
        return entry["value"]
    dtype = getattr(torch, entry["dtype"])
    if "exactly" in entry:
        return torch.tensor(entry["exactly"], dtype=dtype).view(entry["shape"])
    generator = torch.Generator().manual_seed(seed)
    if "range" in entry:
        low, high = entry["range"]
        return torch.randint(low, high + 1, entry["shape"], generator=generator, dtype=dtype)
    out = torch.empty(entry["shape"], dtype=dtype)
    flat, block = out.view(-1), torch.randn(min(out.numel(), 2**24 - 3), generator=generator)
    block = block * entry["std"] + entry["mean"]
    for start in range(0, flat.numel(), block.numel()):
        part = flat[start : start + block.numel()]
        part.copy_(block[: part.numel()])
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    pairs = parser.parse_args().pairs
    torch.set_grad_enabled(False)
    for name in ("workload", "candidate", "baseline", "device", "measured"):
        print(f"{{name:10}} {{FACTS[name]}}")

    values = [draw(entry, i + 1) for i, entry in enumerate(FACTS["arguments"])]
    moving = [i for i, e in enumerate(FACTS["arguments"]) if e["role"] != "resident" and "shape" in e]
    size = sum(values[i].numel() * values[i].element_size() for i in moving)
    copies = min(256, 1 + 3 * FACTS["llc_bytes"] // size) if size else 1
    sets = [[v.clone() if i in moving else v for i, v in enumerate(values)] for _ in range(copies)]

    arm, results, calls = FACTS["arm"], {{}}, {{}}
    prepare = {{
        "candidate": build(arm) if "source" in arm else python_function(arm["function"]),
        "baseline": python_function(FACTS["baseline_function"]),
    }}
    for name, make in prepare.items():
        outputs = [torch.zeros(o["shape"], dtype=getattr(torch, o["dtype"])) for o in FACTS["outputs"]]
        calls[name] = [make(*operands, *outputs) for operands in sets]
        calls[name][0]()
        results[name] = outputs or [sets[0][i].clone() for i in moving]
    for o, a, b in zip(FACTS["outputs"], results["candidate"], results["baseline"]):
        a, b = a.double(), b.double()
        print(f"difference {{o['name']}}: at most {{(a - b).abs().max():.3g}}; values reach {{b.abs().max():.3g}}")

    def sample(name, count, turn=[0]):
        start = time.perf_counter_ns()
        for _ in range(count):
            calls[name][turn[0] % copies]()
            turn[0] += 1
        return (time.perf_counter_ns() - start) / count

    once = min(sample("baseline", 1) for _ in range(5))
    count, each = (1, 2) if once > 1e6 else (max(1, int(4e5 / once)), 8)
    ratios, times, coin = [], {{"candidate": [], "baseline": []}}, random.Random()
    for _ in range(pairs):
        order = ["candidate", "baseline"]
        coin.shuffle(order)
        seen = {{}}
        for name in order:
            time.sleep(0.006)  # the other arm's threads stop spinning
            sample(name, 1)
            taken = sorted(sample(name, count) for _ in range(each))
            seen[name] = (taken[(each - 1) // 2] + taken[each // 2]) / 2
            times[name].append(seen[name])
        ratios.append(seen["baseline"] / seen["candidate"])
    ratios.sort()
    for name, taken in times.items():
        print(f"{{name:10}} {{sorted(taken)[len(taken) // 2] / 1e3:.2f}} us a call, median of {{pairs}} pairs")
    low, high = ratios[pairs // 4], ratios[-1 - pairs // 4]
    print(f"speedup    {{ratios[pairs // 2]:.3f}}x   middle half of the pairs {{low:.3f}} .. {{high:.3f}}")


main()
'''
