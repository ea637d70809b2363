"""What a call costs before its kernel runs: autosel beside the ways PyTorch and Triton offer, around one same function.

    python benchmarks/bench_peers_dispatch.py [--rounds 30] [--calls 5000] [--json]

The kernel does nothing, so what is timed is the way to it: two tensors and two numbers in, one tensor out. One thread,
the collector off, all ways timed once a round in a drawn order, each after a tenth of its calls untimed; a figure is
the median over rounds of the difference to the direct call of the same round, with quartiles. "direct again" is the
control: a ratio to "direct" outside 1 +- 3 % voids the run (exit code 5). A peer that is not installed is said to be
absent, not given a number.
Goals: bound at most 0.1 us, by shape at most 1 us, and ahead of every peer that looks at shapes or dispatches.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import random
import statistics
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import autosel
from autosel import dispatch
from autosel.guard import Policy
from autosel.integrations import torch_ops  # noqa: F401  (registers torch.ops.autosel)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BOUND_LIMIT_US, SHAPE_LIMIT_US, CONTROL = 0.1, 1.0, 0.03
NOTHING = "def nothing(x, weight, eps, offset, out=None):\n    return out\n"


def main() -> int:
    options = _parsed()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, dispatch.use(Path(folder), Policy(on=False)):
        ways = _ways(Path(folder))
        found = _timed(ways, options.rounds, options.calls)
    absent = {name: why for name, why in _ABSENT.items() if why}
    control = found["direct again"]["ratio"]
    void = abs(control - 1.0) > CONTROL
    result = {"torch": torch.__version__, "ways": found, "absent": absent, "control": control, "void": void}
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        _show(result)
    return 5 if void else 0


_ABSENT: dict[str, str] = {}


def _ways(folder: Path) -> dict[str, Callable[[], Any]]:
    """Each makes the same call: x, weight, eps, offset, and the tensor to write."""
    import importlib.util

    (folder / "bench_nothing.py").write_text(NOTHING)
    spec = importlib.util.spec_from_file_location("bench_nothing", folder / "bench_nothing.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_nothing"] = module
    spec.loader.exec_module(module)
    direct = module.nothing
    x, weight, out = torch.randn(1, 64), torch.randn(64), torch.empty(1, 64)
    _serve(folder)
    by_shape = autosel.best("rmsnorm")
    bound = autosel.best("rmsnorm", like=(x, weight))
    assert bound.candidate == "user:nothing", bound.reason
    table = {("rmsnorm", x.shape, x.dtype): direct}
    custom, defined = _custom_op(), _defined()
    ours = torch.ops.autosel.rmsnorm.out
    with torch.inference_mode():
        ways: dict[str, Callable[[], Any]] = {
            "direct": lambda: direct(x, weight, 1e-6, 0.0, out),
            "direct again": lambda: direct(x, weight, 1e-6, 0.0, out),
            "autosel, bound": lambda: bound(x, weight, 1e-6, 0.0, out),
            "autosel, by shape": lambda: by_shape(x, weight, 1e-6, 0.0, out),
            "torch.ops.autosel (out)": lambda: ours(x, weight, 1e-6, 0.0, out=out),
            "a dict on (op, shape, dtype)": lambda: table["rmsnorm", x.shape, x.dtype](x, weight, 1e-6, 0.0, out),
            "torch Library.define/impl": lambda: defined(x, weight, 1e-6, 0.0, out),
            "torch.library.custom_op": lambda: custom(x, weight, 1e-6, 0.0, out),
        }
    return ways | _triton(x, weight, out) | _peers()


def _serve(folder: Path) -> None:
    """The function that does nothing, pinned for this shape."""
    from autosel import ops
    from autosel.candidates import arms, registry
    from autosel.dispatch.board import this_device
    from autosel.ledger import snapshot
    from autosel.ledger.key import current_mode, serving_key
    from autosel.values import Arm, Decision, Knobs, PythonRecipe, digest, to_json

    w, device = ops.find("rmsnorm").workload("fp32", {"M": 1, "d": 64}), this_device()
    recipe = PythonRecipe(target="bench_nothing:nothing", path=str(folder))
    source = arms.python_digest(recipe)
    arm = Arm(
        candidate="user:nothing",
        backend="USER",
        recipe=recipe,
        knobs={},
        digest=digest({"source": source, "knobs": {}}),
    )
    d = Decision(
        id=1,
        state="pinned",
        hw_id=device.hw_id,
        op=w.op,
        bucket=w.bucket,
        mode=current_mode(),
        workload=w,
        arm=arm,
        baseline=arms.arm(registry.baseline("rmsnorm"), w, device, "", Knobs()),
        verdict=None,
        reason="the bench's",
        created_at="2026-01-01T00:00:00Z",
    )
    row = {"key": serving_key(d.hw_id, d.mode, d.bucket), "epoch": 1, "decision": to_json(d)}
    snapshot.publish(folder / snapshot.FILE, snapshot.document(1, [row]))
    dispatch.refresh()


_LIBRARY = torch.library.Library("autosel_bench", "DEF")


def _defined() -> Callable[..., Any]:
    def kernel(x: Tensor, weight: Tensor, eps: float, offset: float, out: Tensor) -> None:
        return None

    _LIBRARY.define("defined(Tensor x, Tensor weight, float eps, float offset, Tensor(a!) out) -> ()")
    _LIBRARY.impl("defined", kernel, "CompositeExplicitAutograd")
    found: Callable[..., Any] = torch.ops.autosel_bench.defined.default
    return found


def _custom_op() -> Callable[..., Any]:
    @torch.library.custom_op("autosel_bench::custom", mutates_args=("out",))
    def custom(x: Tensor, weight: Tensor, eps: float, offset: float, out: Tensor) -> None:
        return None

    made: Callable[..., Any] = custom
    return made


def _triton(x: Tensor, weight: Tensor, out: Tensor) -> dict[str, Callable[[], Any]]:
    """A cache hit of its Autotuner, with a launch that does nothing: there is no device."""
    try:
        import triton
    except ImportError as error:
        _ABSENT["triton Autotuner"] = str(error)
        return {}

    class Nothing:
        arg_names = ("x", "weight", "eps", "offset", "out", "n")
        fn = None

        def run(self, *arguments: Any, **options: Any) -> None:
            return None

    try:
        tuner = triton.runtime.autotuner.Autotuner(
            Nothing(), Nothing.arg_names, [triton.Config({}), triton.Config({}, num_warps=2)], ["n"], None, None
        )
        key = (64, str(x.dtype), str(weight.dtype), str(out.dtype))
        tuner.cache[key] = tuner.configs[0]
        tuner.run(x, weight, 1e-6, 0.0, out, 64, grid=(1,))
    except Exception as error:  # its inside changes between versions
        _ABSENT["triton Autotuner"] = f"this version's cannot be driven without a device: {error!r:.80}"
        return {}
    return {"triton Autotuner, cache hit": lambda: tuner.run(x, weight, 1e-6, 0.0, out, 64, grid=(1,))}


def _peers() -> dict[str, Callable[[], Any]]:
    """Those that need a device, or an engine around them."""
    for name, package in (
        ("flashinfer-bench apply", "flashinfer-bench"),
        ("FlashInfer choose_one", "flashinfer-python"),
        ("vLLM CustomOp", "vllm"),
    ):
        try:
            version = importlib.metadata.version(package)
            _ABSENT[name] = f"{package} {version} is installed; its dispatch is not driven here"
        except importlib.metadata.PackageNotFoundError:
            _ABSENT[name] = f"{package} is not installed"
    return {}


def _timed(ways: dict[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, dict[str, float]]:
    names = list(ways)
    taken: dict[str, list[float]] = {name: [] for name in names}
    timers = {name: timeit.Timer(way) for name, way in ways.items()}
    rng = random.Random(0)
    gc.disable()
    with torch.inference_mode():
        for name in names:
            timers[name].timeit(calls)
        for _ in range(rounds):
            for name in rng.sample(names, len(names)):
                timers[name].timeit(calls // 10)  # what ran before it left its own code in the caches
                taken[name].append(timers[name].timeit(calls) / calls * 1e6)
    gc.enable()
    found = {}
    for name in names:
        over = sorted(t - d for t, d in zip(taken[name], taken["direct"], strict=True))
        ratio = statistics.median(t / d for t, d in zip(taken[name], taken["direct"], strict=True))
        quarter = len(over) // 4
        found[name] = {
            "us": statistics.median(taken[name]),
            "over_us": statistics.median(over),
            "low_us": over[quarter],
            "high_us": over[-quarter - 1],
            "ratio": ratio,
        }
    return found


def _show(result: dict[str, Any]) -> None:
    print(f"torch {result['torch']}, one thread; microseconds over the direct call, quartiles")
    for name, w in result["ways"].items():
        print(f"  {name:<30} {w['over_us']:7.3f}   {w['low_us']:.3f} .. {w['high_us']:.3f}")
    for name, why in result["absent"].items():
        print(f"  {name:<30} absent: {why}")
    bound, shape = (result["ways"][f"autosel, {n}"]["over_us"] for n in ("bound", "by shape"))
    print(f"goals: bound {bound:.3f} of {BOUND_LIMIT_US} us, by shape {shape:.3f} of {SHAPE_LIMIT_US} us")
    print(f"control {result['control']:.3f}" + ("  VOID: outside 1 +- 3 %" if result["void"] else ""))


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
