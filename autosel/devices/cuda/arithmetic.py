"""Measure a GPU's arithmetic: special functions, products and conversions per SM and clock, shared memory, matrix
products.

Each figure follows the rules of bench.py. A kernel of kernels/cuda/probes.cu counts its clock ticks in addition to
the time by events, so a rate per clock can be checked without a clock rate.

Status: compiled and emulated; not yet run on silicon.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from autosel.devices.cuda.bench import ProbeBench
from autosel.errors import UsageError

THREADS = 512  # of one block per SM: 16 warps
CHAINS = 8
STEPS = 4096
SHARED_BYTES = 16 << 10  # of a block of probe_shared
PRODUCT_STEPS = 65536  # some 5 ms: the clock settles at the rate that products allow
MATRIX_SIDE = 8192
# kernel, rate per second, its unit, results per step, rate per clock and SM, that unit
PROBES = (
    ("probe_exp2", "exp_per_s", "1/s", 1, "exp_per_clock_sm", "1/clk"),
    ("probe_fma", "fma_flops", "FLOP/s", 2, "fma_flop_per_clock_sm", "FLOP/clk"),
    ("probe_shared", "shared_bytes_per_s", "B/s", 16, "shared_bytes_per_clock_sm", "B/clk"),
)
FROM_FP8 = ("probe_from_fp8", "from_fp8_per_s", "1/s", 2, "from_fp8_per_clock_sm", "1/clk")
# FLOP of one warp's instruction, m16n8k16 and m16n8k32. sm_90 and sm_100 have none for fp8 (ptxas uses fp16's).
MMA = (("probe_mma_bf16", "mma_bf16_flops", 4096),)
MMA_FP8 = (("probe_mma_fp8", "mma_fp8_flops", 8192),)


def measure(bench: ProbeBench) -> None:
    cc = float(bench.identity["cc"])
    for probe in (*PROBES, *((FROM_FP8,) if cc >= 8.9 else ())):
        _chains(bench, *probe)
    for probe in (*(MMA if cc >= 8.0 else ()), *(MMA_FP8 if cc == 8.9 or cc >= 12.0 else ())):
        _products_in_registers(bench, *probe)
    matrix(bench)


def _chains(bench: ProbeBench, kernel: str, name: str, unit: str, each: int, by_clock: str, clock_unit: str) -> None:
    """Measure 8 dependent chains x 16 warps per SM, by events and by the ticks that the kernel counts."""
    cp, of_one_sm = bench.cupy, THREADS * CHAINS * STEPS * each

    def work() -> None:
        sizes = (cp.uint32(STEPS), cp.float32(1e-6), bench.ticks, bench.word)
        bench.launch(kernel, bench.sms, THREADS, *sizes, shared_bytes=SHARED_BYTES)

    bench.keep(name, unit, [bench.sms * of_one_sm / s for s in bench.repeated(work)])
    ticks = []
    for _ in range(bench.windows):
        bench.seconds(work)
        ticks.append(float(bench.ticks[0].get()))
    bench.keep(by_clock, clock_unit, [of_one_sm / t for t in ticks])


def _products_in_registers(bench: ProbeBench, kernel: str, name: str, flop: int) -> None:
    """Measure 8 accumulators per warp, 16 warps per SM, and the clock of the device under this load."""
    cp, steps = bench.cupy, PRODUCT_STEPS
    total = bench.sms * THREADS // 32 * CHAINS * steps * flop

    def work() -> None:
        bench.launch(kernel, bench.sms, THREADS, cp.uint32(steps), cp.float32(0), bench.ticks, bench.word)

    seconds = bench.repeated(work)
    bench.keep(name, "FLOP/s", [total / s for s in seconds])
    if name == "mma_bf16_flops":  # ticks of the last launch of the last window, at its mean time
        bench.keep("matrix_clock_hz", "Hz", [float(bench.ticks[0].get()) / seconds[-1]])


# --- the library's products ------------------------------------------------------------------------------------------


def matrix(bench: ProbeBench) -> None:
    """Measure the library's GEMM, 8192^3 on random data: the attainable rate, not the datasheet's."""
    try:
        import torch
    except ImportError:
        bench.notes.append("matrix rates need torch")
        return
    if not torch.cuda.is_available():
        bench.notes.append("matrix rates: this torch has no CUDA")
        return
    device = torch_device(bench.cupy)
    with torch.cuda.device(device):
        try:
            _products(bench, device)
        except torch.OutOfMemoryError as error:
            why = str(error).splitlines()[0]
            raise UsageError("the device is out of memory", why=why, todo="end what runs there") from error
        finally:
            torch.cuda.empty_cache()


def _products(bench: ProbeBench, device: Any) -> None:
    import torch

    a = torch.randn(MATRIX_SIDE, MATRIX_SIDE, device=device, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    _matmul(bench, "bf16_matrix_flops", partial(torch.mm, a, b))
    if float(bench.identity["cc"]) >= 8.9:
        one = torch.ones((), device=device)
        x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
        fp8 = partial(torch._scaled_mm, x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        try:
            _matmul(bench, "fp8_matrix_flops", fp8)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a library without that product for this device: formulas work without
            bench.notes.append(f"no fp8 matrix rate: {str(error).splitlines()[0][:200]}")


def _matmul(bench: ProbeBench, name: str, work: Callable[[], Any]) -> None:
    import torch

    for _ in range(3):
        work()
    figures = []
    for _ in range(bench.windows):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            work()
        end.record()
        end.synchronize()
        figures.append(20 * 2 * MATRIX_SIDE**3 / (begin.elapsed_time(end) * 1e-3))
    bench.keep(name, "FLOP/s", figures)


def torch_device(cupy: Any) -> Any:
    """Return PyTorch's device for the present device of cupy; PyTorch has a separate current device."""
    import torch

    return torch.device("cuda", cupy.cuda.Device().id)
