"""Compare autosel's choice of a kernel with Inductor's max-autotune and Kernel Tuner: time, quality, stability.

    python benchmarks/bench_peers_tune.py --kernel-tuner PYTHON [--processes 30] [--limit 200] [--write]
    python benchmarks/bench_peers_tune.py --kernel-tuner PYTHON --only judge --write        on an idle machine

The case is one projection of a decode step, bf16, M=1: x[1,K] @ w[N,K]^T. Each tuner chooses in --processes separate
processes with empty caches: autosel by `tune` in an empty home (fingerprint, build, parity, race), Inductor by
`max_autotune` over its CPP and ATEN backends (frozen weights), Kernel Tuner by its C backend and brute force over
settings of autosel's kernel, compiled with the same flags and with the correct answer given. The tuners take turns.

    time     from process start to the choice
    flips    the share of processes that did not choose the most common choice
    regret   t(chosen) / t(best) - 1 among the tuner's own candidates. `judge` times all candidates in turn, with
             operands evicted from the caches as in a decode step; the best is chosen on one half of the rounds and
             judged on the other, both ways. Mean and worst over the processes
    planted  kernels that are each wrong in one way (tests/cpu/planted.cpp): caught, believed, or the tuner died.
             A tuner without checks is "not covered"

PYTHON is the Python of an environment with kernel_tuner; without it, Kernel Tuner is not covered. With --write,
results are stored after every process and reused by the next run, so that --limit SECONDS can split the measurement.
"""

# ruff: noqa: E402  (the checkout first: this file is run by path)

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import peers_tables
from kept import keep
from peers_tables import AUTOSEL, INDUCTOR, KERNEL_TUNER, RESULTS

if TYPE_CHECKING:
    from autosel.values import Fingerprint, Workload

N = K = 2048
TUNERS = (AUTOSEL, INDUCTOR, KERNEL_TUNER)
ROWS = (1, 2, 4, 8)
ROUNDS = 60
FLUSH_BYTES = 256 << 20
CHILD_S = 240.0
RESULT = "peers-tune"


def main() -> int:
    options = _parsed()
    if options.child:
        json.dump(_CHILDREN[options.child](options.seed), sys.stdout)
        return 0
    found: dict[str, Any] = dict(peers_tables.stored(RESULT) or {}) if options.write and not options.fresh else {}
    end = time.monotonic() + options.limit
    for part in options.only or ("runs", "planted", "judge"):
        _PARTS[part](found, options, end)
    print(peers_tables.tune(found))
    return 0


def _keep(found: dict[str, Any], options: argparse.Namespace) -> None:
    from autosel.dispatch.board import this_device

    found |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "device": this_device().name}
    found["load"] = round(os.getloadavg()[0], 2)
    if options.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        keep(RESULTS / f"{RESULT}.json", found)


# --- runs: each tuner, process by process -----------------------------------------------------------------------------


def runs(found: dict[str, Any], options: argparse.Namespace, end: float) -> None:
    """Run the tuners in rotation, so that other load affects all of them."""
    taken: dict[str, list[Any]] = found.setdefault("runs", {name: [] for name in TUNERS})
    found["shape"] = [N, K]
    tuners = [name for name in TUNERS if name != KERNEL_TUNER or options.kernel_tuner]
    while time.monotonic() < end:
        todo = [name for name in tuners if len(taken[name]) < options.processes]
        if not todo:
            return
        name = min(todo, key=lambda name: len(taken[name]))
        begin = time.perf_counter()
        made = _run(name, options.kernel_tuner, len(taken[name]))
        taken[name].append({"seconds": time.perf_counter() - begin, **made})
        print(f"{name} {len(taken[name])}/{options.processes}: {taken[name][-1]}"[:150], file=sys.stderr, flush=True)
        _keep(found, options)


def _run(name: str, kernel_tuner: str, number: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        if name == KERNEL_TUNER:
            command = [kernel_tuner, str(Path(__file__).parent / "peers_kernel_tuner.py"), "tune", _asked()]
        else:
            child = "autosel" if name == AUTOSEL else "inductor"
            command = [sys.executable, __file__, "--child", child, "--seed", str(number)]
        own = {"AUTOSEL_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        done = subprocess.run(
            command, env=os.environ | own, cwd=folder, capture_output=True, text=True, timeout=CHILD_S
        )
    if done.returncode:
        raise SystemExit(f"{name} failed\n{done.stderr[-2000:]}")
    return _named(name, json.loads(done.stdout.splitlines()[-1]))


def _named(name: str, made: dict[str, Any]) -> dict[str, Any]:
    """Return the choice with its name in `judge`."""
    if name != KERNEL_TUNER:
        return made
    return {
        "pick": setting(made["pick"]["THREADS"], made["pick"]["ROWS"]),
        "reported_us": min(made["times_us"].values()),
    }


def setting(threads: int, rows: int) -> str:
    return f"cpp:gemv threads={threads} rows={rows}"


def _asked() -> str:
    """Return Kernel Tuner's settings, and the flags that autosel compiles them with."""
    from autosel.native.compile import BASE_FLAGS

    fp = _device()
    flags = [f for f in (*BASE_FLAGS, *_recipe(fp).flags) if f != "-shared"]
    settings = {"THREADS": list(range(1, int(fp.identity["cpus"]) + 1)), "ROWS": ROWS}
    return json.dumps({"shape": [N, K], "flags": flags, "settings": settings})


def _workload() -> Workload:
    from autosel.ops import OPS

    return OPS["linear"].workload("bf16", {"M": 1, "N": N, "K": K})


def _device() -> Fingerprint:
    from autosel import fingerprint

    return fingerprint.take("cpu")


def _recipe(fp: Fingerprint) -> Any:
    from autosel.candidates import registry

    kernel, w = registry.find("linear", "cpp:gemv"), _workload()
    return kernel.recipe(w, fp, kernel.knobs(w, fp))


# --- children ---------------------------------------------------------------------------------------------------------


def _tuned_by_autosel(seed: int) -> dict[str, Any]:
    from autosel import pipeline
    from autosel.ledger import open_ledger
    from autosel.models.workloads import Named
    from autosel.tuning.job import Request

    class Silent:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *arguments, **named: None

    named = Named(workload=_workload(), label="gemv", calls_per_step=1)
    with open_ledger(alone=True) as ledger:
        report = pipeline.tune(Request(workloads=(named,), seed=seed), ledger, Silent())  # type: ignore[arg-type]
    if not report.decisions:
        return {"pick": "ATEN", "outcome": "undecided"}
    d = report.decisions[0]
    own = d.arm.candidate == "cpp:gemv"
    pick = setting(int(d.arm.knobs["threads"]), int(d.arm.knobs["rows"])) if own else "ATEN"
    return {"pick": pick, "outcome": d.state}


def _tuned_by_inductor(seed: int) -> dict[str, Any]:
    import torch
    from torch._inductor import config, select_algorithm

    said: list[dict[str, float]] = []
    select_algorithm.add_feedback_saver(  # the times that it measured for each choice
        lambda timings, *rest: said.append({choice.name: ms for choice, ms in timings.items()})
    )
    config.max_autotune, config.freezing, config.max_autotune_gemm_backends = True, True, "ATEN,CPP"
    with torch.inference_mode():
        torch.compile(_module(seed))(torch.randn(1, K, dtype=torch.bfloat16))
    times = said[-1]
    best = min(times, key=lambda name: times[name])
    pick = "Inductor CPP" if best.startswith("cpp_") else "Inductor ATEN"
    return {"pick": pick, "reported_us": 1e3 * times[best], "choices": len(times)}


def _module(seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    return torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16).eval()


_CHILDREN: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "autosel": _tuned_by_autosel,
    "inductor": _tuned_by_inductor,
}


# --- judge: quality of the choices ------------------------------------------------------------------------------------


def judge(found: dict[str, Any], options: argparse.Namespace, end: float) -> None:
    """Time every candidate in turn with cold operands; store microseconds by round."""
    import torch

    from autosel.devices.cpu.idle import wait_until_idle

    fp = _device()
    torch.set_num_threads(int(fp.identity["cpus"]))
    with torch.inference_mode():
        arms, rng = _arms(fp), random.Random(1)
        flush = torch.ones(FLUSH_BYTES // 4)
        for call in arms.values():
            call()
        times: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(ROUNDS):
            for name in rng.sample(list(arms), len(arms)):
                flush.add_(1.0)
                wait_until_idle()
                begin = time.perf_counter_ns()
                arms[name]()
                times[name].append((time.perf_counter_ns() - begin) / 1e3)
    found["judged"] = {"us": {name: [round(t, 2) for t in taken] for name, taken in times.items()}}
    found["versions"] = _versions(options.kernel_tuner)
    _keep(found, options)


def _arms(fp: Fingerprint) -> dict[str, Callable[[], Any]]:
    import torch
    from torch._inductor import config

    from autosel.candidates.load import load
    from autosel.native.compile import compile_source
    from autosel.ops import OPS

    module, x = _module(0), torch.randn(1, K, dtype=torch.bfloat16)
    w, y, recipe = module.weight.detach(), torch.empty(1, N, dtype=torch.bfloat16), _recipe(fp)
    built = compile_source(recipe.source, recipe.flags).digest

    def ours(threads: int, rows: int) -> Callable[[], Any]:
        run = load(OPS["linear"], recipe, built, {"threads": threads, "rows": rows})
        return lambda: run(x, w, None, None, y)

    arms = {setting(t, r): ours(t, r) for t in range(1, int(fp.identity["cpus"]) + 1) for r in ROWS}
    arms["ATEN"] = lambda: torch.mm(x, w.t(), out=y)
    config.max_autotune, config.freezing = True, True
    for backend in ("ATEN", "CPP"):
        torch._dynamo.reset()
        config.max_autotune_gemm_backends = backend
        compiled = torch.compile(module)
        compiled(x)
        arms[f"Inductor {backend}"] = lambda compiled=compiled: compiled(x)
    return arms


def _versions(kernel_tuner: str) -> dict[str, str]:
    import torch

    found = {"torch": torch.__version__}
    if kernel_tuner:
        code = "from importlib.metadata import version; print(version('kernel_tuner'))"
        done = subprocess.run([kernel_tuner, "-c", code], capture_output=True, text=True)
        found["kernel_tuner"] = done.stdout.strip()
    return found


# --- planted ----------------------------------------------------------------------------------------------------------


def planted(found: dict[str, Any], options: argparse.Namespace, end: float) -> None:
    """Test each planted native kernel with autosel's parity and with Kernel Tuner, which gets the correct answer."""
    from autosel.parity.check import Prover, Terms
    from autosel.values import Failed
    from tests.cpu.planting import RMSNORM, proof
    from tests.cpu.test_parity_check_plants import KERNELS, RIGHT

    wrong = sorted({k.proof.digest for k in KERNELS if k.proof.digest.startswith("native_")})
    right = sorted({p.digest for p in RIGHT if p.digest.startswith("native_")})
    kept = found.setdefault("planted", {"wrong": wrong, "right": right, AUTOSEL: {}, KERNEL_TUNER: {}})
    with Prover(None, Terms(), threads=1) as prover:
        for name in [n for n in (*wrong, *right) if n not in kept[AUTOSEL]]:
            verdict = prover.prove(proof(name))
            kept[AUTOSEL][name] = f"caught: {verdict.check}" if isinstance(verdict, Failed) else "believed"
            _keep(found, options)
            if time.monotonic() > end:
                return
    m, d = RMSNORM["M"], RMSNORM["d"]
    for name in [n for n in (*wrong, *right) if n not in kept[KERNEL_TUNER] and options.kernel_tuner]:
        kept[KERNEL_TUNER][name] = _before_kernel_tuner(options.kernel_tuner, {"function": name, "m": m, "d": d})
        _keep(found, options)
        if time.monotonic() > end:
            return


def _before_kernel_tuner(python: str, asked: Mapping[str, Any]) -> str:
    command = [python, str(Path(__file__).parent / "peers_kernel_tuner.py"), "check", json.dumps(asked)]
    with tempfile.TemporaryDirectory() as folder:  # it leaves its sources in the working directory
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            return "died: it hung"
    if done.returncode:
        return f"died: exit code {done.returncode}"
    return "caught: answer" if json.loads(done.stdout)["caught"] else "believed"


_PARTS: Mapping[str, Callable[[dict[str, Any], argparse.Namespace, float], None]] = {
    "runs": runs,
    "planted": planted,
    "judge": judge,
}


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--kernel-tuner", default="", metavar="PYTHON", help="Python of an environment with kernel_tuner"
    )
    parser.add_argument("--processes", type=int, default=30, help="processes of each tuner")
    parser.add_argument(
        "--limit", type=float, default=1e9, metavar="SECONDS", help="start no new process after SECONDS"
    )
    parser.add_argument("--only", action="append", choices=list(_PARTS))
    parser.add_argument("--write", action="store_true", help=f"store results in {RESULT}.json and continue from it")
    parser.add_argument("--fresh", action="store_true", help="with --write: ignore stored results")
    parser.add_argument("--child", choices=list(_CHILDREN), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
