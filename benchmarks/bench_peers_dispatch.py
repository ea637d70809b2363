"""Measure the overhead of a call before its kernel runs: autosel, PyTorch and Triton around the same function.

    python benchmarks/bench_peers_dispatch.py [--rounds 30] [--calls 5000] [--json] [--write]

The kernel does nothing, so only the dispatch is timed: two tensors and two numbers in, one tensor out. The benchmark
uses one thread with the garbage collector off. Each round times all variants once in random order, each after a tenth
of its calls untimed. A figure is the median over rounds of the difference to the direct call of the same round, with
quartiles. "direct again" is the control: a ratio to "direct" outside 1 +- 3 % voids the run (exit code 5), and nothing
is written. A peer that is not installed, or that cannot make a call here, is listed as "not covered" with the reason.
Serving engines are imported from the environment, or from the wheels that `python tests/engines.py` fetches.

Goals: bound at most 0.1 us, by shape at most 1 us, and faster than every peer that looks at shapes or dispatches.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import random
import statistics
import sys
import tempfile
import timeit
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import command_line
import peers_tables
from kept import keep

import autosel
from autosel import dispatch
from autosel.guard import Policy
from autosel.integrations import torch_ops  # noqa: F401  (registers torch.ops.autosel)
from tests import engines

BOUND_LIMIT_US, SHAPE_LIMIT_US, CONTROL = 0.1, 1.0, 0.03
RESULT = Path(__file__).parent / "results" / "cpu" / "peers-dispatch.json"
PACKAGES = ("torch", "triton", "flashinfer-bench", "apache-tvm-ffi", "flashinfer-python", "vllm")
NOTHING = "def nothing(x, weight, eps, offset, out=None):\n    return out\n"


def main() -> int:
    options = _parsed()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_:
        open_.enter_context(dispatch.use(Path(folder), Policy(on=False)))
        ways = _ways(Path(folder), open_)
        found = _timed(ways, options.rounds, options.calls)
    control = found["direct again"]["ratio"]
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "rounds": options.rounds,
        "calls": options.calls,
        "load": round(os.getloadavg()[0], 2),
        "control": control,
        "void": abs(control - 1.0) > CONTROL,
        "limits_us": {"autosel, bound": BOUND_LIMIT_US, "autosel, by shape": SHAPE_LIMIT_US},
        "ways": found,
        "not_covered": dict(_ABSENT),
    }
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        print(peers_tables.dispatch(result))
    if result["void"]:
        print(f"VOID: the control's ratio is {control:.3f}, outside 1 +- {CONTROL:.0%}", file=sys.stderr)
        return 5
    if options.write:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        keep(RESULT, result)
    return 0


def device() -> str:
    from autosel.dispatch.board import this_device

    return str(this_device().name)


_ABSENT: dict[str, str] = {}


def _ways(folder: Path, open_: ExitStack) -> dict[str, Callable[[], Any]]:
    """Return the variants; all make the same call: x, weight, eps, offset, and the output tensor.

    `open_` holds resources that last for the run.
    """
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
    sys.path += engines.paths("flashinfer", "vllm").split(os.pathsep)[1:]  # searched after the installed packages
    for peer in (
        _triton(x, weight, out),
        _flashinfer_bench(folder, open_, x, weight, out),
        _flashinfer(direct, x, weight, out),
        _vllm(direct, x, weight, out),
    ):
        ways |= peer
    return ways


def _serve(folder: Path) -> None:
    """Pin the function that does nothing for this shape."""
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
    """Return a cache hit of Triton's Autotuner, with a launch that does nothing, since it needs no device."""
    try:
        import triton
    except ImportError as error:
        _ABSENT["triton Autotuner"] = str(error)
        return {}

    class Nothing:
        arg_names = ("x", "weight", "eps", "offset", "out", "n")
        fn = staticmethod(_missed)  # a function whose source it can hash

        def run(self, *arguments: Any, **options: Any) -> None:
            return None

    try:
        tuner = triton.runtime.autotuner.Autotuner(
            Nothing(), [*Nothing.arg_names], [triton.Config({}), triton.Config({}, num_warps=2)], ["n"], None, None
        )
        key = (64, str(x.dtype), str(weight.dtype), str(out.dtype))
        tuner.cache[key] = tuner.configs[0]
        tuner.run(x, weight, 1e-6, 0.0, out, 64, grid=(1,))
    except Exception as error:  # its internals change between versions
        _ABSENT["triton Autotuner"] = f"this version cannot run without a device: {error!r:.80}"
        return {}
    return {"triton Autotuner, cache hit": lambda: tuner.run(x, weight, 1e-6, 0.0, out, 64, grid=(1,))}


def _flashinfer_bench(
    folder: Path, open_: ExitStack, x: Tensor, weight: Tensor, out: Tensor
) -> dict[str, Callable[[], Any]]:
    """Return `apply` with one Solution for exactly this shape: a hit that writes to the given tensor."""
    name = "flashinfer-bench apply, hit"
    os.environ["FIB_CACHE_PATH"] = str(folder / "fib")
    try:
        with redirect_stdout(sys.stderr), redirect_stderr(sys.stderr):
            import flashinfer_bench as fib
            from flashinfer_bench.apply import ApplyConfig, ApplyRuntime
    except ImportError as error:
        _ABSENT[name] = f"cannot be imported here: {error!s:.80}"
        return {}
    try:
        runtime = ApplyRuntime(_trace_set(fib.data), ApplyConfig())
        runtime.start()
        open_.callback(runtime.stop)
        arguments = (x, weight, 1e-6, 0.0, out)
        _nothing_else_may_run(lambda: fib.apply("rmsnorm_d64", args=arguments, fallback=_missed), out)
    except Exception as error:  # its internals change between versions
        _ABSENT[name] = f"this version cannot run here: {error!r:.80}"
        return {}
    return {name: lambda: fib.apply("rmsnorm_d64", args=(x, weight, 1e-6, 0.0, out), fallback=_missed)}


def _missed(*arguments: Any) -> None:
    raise AssertionError("the lookup missed")


def _nothing_else_may_run(call: Callable[[], Any], out: Tensor) -> None:
    """Check that the call ran the kernel that does nothing: the output is unchanged."""
    out.fill_(7.0)
    call()
    assert bool((out == 7.0).all())


def _trace_set(data: Any) -> Any:
    """Return a trace set with one definition, one solution, and one trace that passed at M = 1."""
    shape = {"x": ["M", "d"], "weight": ["d"], "eps": None, "offset": None}
    definition = data.Definition.model_validate(
        {
            "name": "rmsnorm_d64",
            "op_type": "rmsnorm",
            "axes": {"M": {"type": "var"}, "d": {"type": "const", "value": 64}},
            "inputs": {n: {"shape": s, "dtype": "float32"} for n, s in shape.items()},
            "outputs": {"y": {"shape": ["M", "d"], "dtype": "float32"}},
            "reference": "def run(x, weight, eps, offset):\n    return x\n",
        }
    )
    solution = data.Solution.model_validate(
        {
            "name": "nothing",
            "definition": definition.name,
            "author": "bench",
            "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": "main.py::run"},
            "sources": [{"path": "main.py", "content": "def run(x, weight, eps, offset, y):\n    return None\n"}],
        }
    )
    random = {"type": "random"}
    inputs = {"x": random, "weight": random}
    inputs |= {n: {"type": "scalar", "value": v} for n, v in (("eps", 1e-6), ("offset", 0.0))}  # type: ignore[dict-item]
    trace = data.Trace.model_validate(
        {
            "definition": definition.name,
            "workload": {"axes": {"M": 1}, "inputs": inputs, "uuid": "1"},
            "solution": solution.name,
            "evaluation": {
                "status": "PASSED",
                "environment": {"hardware": "cpu"},
                "timestamp": "2026-01-01",
                "correctness": {},
                "performance": {"latency_ms": 1.0, "reference_latency_ms": 2.0, "speedup_factor": 2.0},
            },
        }
    )
    return data.TraceSet(
        definitions={definition.name: definition},
        solutions={definition.name: [solution]},
        traces={definition.name: [trace]},
    )


def _flashinfer(direct: Callable[..., Any], x: Tensor, weight: Tensor, out: Tensor) -> dict[str, Callable[[], Any]]:
    """Return a hit in FlashInfer's AutoTuner cache, one runner with one tactic, and the runner's call."""
    name = "FlashInfer AutoTuner.choose_one, hit"
    try:
        with redirect_stdout(sys.stderr), redirect_stderr(sys.stderr):
            from flashinfer.autotuner import AutoTuner, TunableRunner, TuningConfig
    except Exception as error:  # a wheel without its kernels
        _ABSENT[name] = f"cannot be imported here: {error!s:.80}"
        return {}

    class Nothing(TunableRunner):  # type: ignore[misc]
        def get_valid_tactics(self, inputs: Any, profile: Any) -> list[int]:
            return [7]

        def forward(self, inputs: Any, tactic: int = -1, do_preparation: bool = False, **named: Any) -> Any:
            return direct(inputs[0], inputs[1], 1e-6, 0.0, inputs[2])

    try:
        tuner, runner, config = AutoTuner.get(), Nothing(), TuningConfig()
        shapes = tuple(tuner._get_input_sizes([x, weight, out]))
        tuner._winner_cache()[AutoTuner._get_cache_key("nothing", runner, shapes, config)] = (7, None)

        def call() -> Any:
            inputs = [x, weight, out]
            chosen, tactic = tuner.choose_one("nothing", [runner], config, inputs)
            return chosen(inputs, tactic=tactic)

        assert tuner.choose_one("nothing", [runner], config, [x, weight, out])[1] == 7, "the lookup missed"
        _nothing_else_may_run(call, out)
    except Exception as error:  # its internals change between versions
        _ABSENT[name] = f"this version cannot run here: {error!r:.80}"
        return {}
    return {name: call}


def _vllm(direct: Callable[..., Any], x: Tensor, weight: Tensor, out: Tensor) -> dict[str, Callable[[], Any]]:
    """Return a call of a vLLM CustomOp: a module that selects its forward for the platform at construction."""
    name = "vLLM CustomOp"
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    try:
        with redirect_stdout(sys.stderr), redirect_stderr(sys.stderr):
            from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
            from vllm.model_executor.custom_op import CustomOp
    except Exception as error:  # a wheel without its kernels
        _ABSENT[name] = f"cannot be imported here: {error!s:.80}"
        return {}
    try:

        @CustomOp.register("autosel_bench_nothing")  # type: ignore[untyped-decorator]
        class Nothing(CustomOp):  # type: ignore[misc]
            def forward_cpu(self, *arguments: Any) -> Any:
                return direct(*arguments)

        with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))):
            op = Nothing()
        _nothing_else_may_run(lambda: op(x, weight, 1e-6, 0.0, out), out)
    except Exception as error:  # its internals change between versions
        _ABSENT[name] = f"this version cannot run here: {error!r:.80}"
        return {}
    return {name: lambda: op(x, weight, 1e-6, 0.0, out)}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


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
                timers[name].timeit(calls // 10)  # other variants have evicted its code from the caches
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


def _parsed() -> argparse.Namespace:
    parser = command_line.parser(__doc__, write=f"store the result in benchmarks/results/cpu/{RESULT.name}")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=5000)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
