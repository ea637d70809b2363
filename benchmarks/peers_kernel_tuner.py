"""Run Kernel Tuner's C backend on an autosel kernel, in Kernel Tuner's own environment; see bench_peers_tune.py.

    PYTHON benchmarks/peers_kernel_tuner.py tune '{"shape": [n, k], "flags": [...], "settings": {...}}'
    PYTHON benchmarks/peers_kernel_tuner.py check '{"function": "native_zeros", "m": 3, "d": 512}'

Prints one JSON document. Needs kernel_tuner and numpy, and of autosel only its sources.
"""

import contextlib
import io
import json
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TIMED = """
#define AUTOSEL_PLAIN_C
#include <chrono>
#include "cpu/gemv.cpp"
extern "C" float timed(uint16_t* x, uint16_t* w, uint16_t* y) {
  using autosel::TensorView;
  TensorView tx{x, 2, {1, K}, {K, 1}, kDLBfloat, 16}, tw{w, 2, {N, K}, {K, 1}, kDLBfloat, 16};
  TensorView ty{y, 2, {1, N}, {N, 1}, kDLBfloat, 16};
  int64_t threads_ = THREADS, rows_ = ROWS;
  void* args[] = {&tx, &tw, nullptr, nullptr, &ty, &threads_, &rows_};
  auto begin = std::chrono::steady_clock::now();
  if (autosel_gemv(args) != nullptr) return -1.0f;
  return std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - begin).count();
}
"""
CHECKED = """
#include "tests/cpu/planted.cpp"
extern "C" float timed(uint16_t* x, uint16_t* weight, uint16_t* y) {
  Call c{x, weight, y, M, D, D, D, 1e-6f, 0.0f};
  FUNCTION(&c);
  return 1.0f;
}
"""


def main():
    asked = json.loads(sys.argv[2])
    with contextlib.redirect_stdout(io.StringIO()):
        found = {"tune": tune, "check": check}[sys.argv[1]](**asked)
    json.dump(found, sys.stdout)


def tune(shape, flags, settings):
    """Tune by brute force over the settings, seven runs of each (the default), checking the answer as in its guide."""
    from kernel_tuner import tune_kernel

    n, k = shape
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(size, dtype=np.float32) for size in ((1, k), (n, k)))
    x16, w16 = narrow(x), narrow(w)
    expected = wide(x16) @ wide(w16).T
    begin = time.perf_counter()
    results, _ = tune_kernel(
        "timed",
        f"#define N {n}\n#define K {k}\n{TIMED}",
        n,
        [x16, w16, np.zeros((1, n), np.uint16)],
        settings,
        lang="C",
        compiler="g++",
        compiler_options=[*flags, "-pthread", f"-I{ROOT / 'kernels'}"],
        answer=[None, None, expected],
        verify=lambda answer, result, atol: close(answer[2], wide(result[2])),
        quiet=True,
    )
    taken = [r for r in results if isinstance(r.get("time"), float) and r["time"] > 0]
    best = min(taken, key=lambda r: r["time"])
    return {
        "seconds": time.perf_counter() - begin,
        "pick": {name: int(best[name]) for name in settings},
        "times_us": {json.dumps({n: int(r[n]) for n in settings}): 1e3 * r["time"] for r in taken},
        "failed": len(results) - len(taken),
    }


def check(function, m, d):
    """Check whether a planted kernel is refused with the correct answer given, as in its guide: `answer`, `verify`."""
    from kernel_tuner import tune_kernel

    rng = np.random.default_rng(1)
    x, weight = (narrow(rng.standard_normal(size, dtype=np.float32)) for size in ((m, d), (d,)))
    wx = wide(x).astype(np.float64)
    expected = wx / np.sqrt((wx**2).mean(-1, keepdims=True) + 1e-6) * wide(weight)
    try:
        tune_kernel(
            "timed",
            f"#define M {m}\n#define D {d}\n#define FUNCTION {function}\n{CHECKED}",
            d,
            [x, weight, np.zeros((m, d), np.uint16)],
            {"ONE": [1]},
            lang="C",
            compiler="g++",
            compiler_options=["-std=c++17", "-O1", "-pthread", f"-I{ROOT}"],
            answer=[None, None, expected],
            verify=lambda answer, result, atol: close(answer[2], wide(result[2])),
            quiet=True,
        )
    except RuntimeError as error:
        if "verification failed" in str(error):
            return {"caught": True}
        raise
    return {"caught": False}


def close(expected, found):
    """Return True within three bf16 roundings of the row's scale, as a careful user would require."""
    return bool(np.allclose(expected, found, rtol=2**-7, atol=2**-7 * np.abs(expected).mean()))


def narrow(values):
    """Convert fp32 to bf16 bits, rounding to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def wide(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


if __name__ == "__main__":
    main()
