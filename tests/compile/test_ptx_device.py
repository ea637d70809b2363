"""Test the device that tests/rehearsal provides: it follows CUDA's rules for streams, captures and faults, so
that host code that breaks a rule fails there as on a GPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("tvm_ffi")

from autosel.native.cuda import find_nvcc
from tests.rehearsal import device

ROOT = Path(__file__).resolve().parents[2]
ILLEGAL_ADDRESS = 700
UNSUPPORTED, INVALIDATED, UNJOINED, ISOLATION, IMPLICIT = 900, 901, 904, 905, 906

# The start of each test's process. Each test has its own, because a device is unusable after a fault.
BEGIN = """
import ctypes
cuda = ctypes.CDLL("libcudart.so.13")
driver = ctypes.CDLL("libcuda.so.1")
void, size = ctypes.c_void_p, ctypes.c_size_t
ADD = b'''
.version 9.0
.target sm_90a
.address_size 64
.visible .entry add(.param .u64 at, .param .u32 by) {
  .reg .b64 %rd<3>; .reg .b32 %r<4>;
  ld.param.u64 %rd1, [at]; ld.param.u32 %r1, [by]; cvta.to.global.u64 %rd2, %rd1;
  ld.global.u32 %r2, [%rd2]; add.u32 %r3, %r2, %r1; st.global.u32 [%rd2], %r3; ret;
}
'''
def made(create, *more):
    out = void()
    assert create(ctypes.byref(out), *more) == 0
    return out
def stream(flags=1):
    return made(cuda.cudaStreamCreateWithFlags, flags)
def event():
    return made(cuda.cudaEventCreate)
module = made(driver.cuModuleLoadData, ADD)
kernel = made(driver.cuModuleGetFunction, module, b"add")
def add(at, by, on):
    where, number = ctypes.c_uint64(at if isinstance(at, int) else at.value), ctypes.c_uint32(by)
    args = (void * 2)(ctypes.addressof(where), ctypes.addressof(number))
    return driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, on, args, None)
def word():
    at = made(cuda.cudaMalloc, size(4))
    assert cuda.cudaMemset(at, 0, size(4)) == 0
    assert cuda.cudaDeviceSynchronize() == 0
    return at
def value(at):
    return ctypes.c_uint32.from_address(at.value).value
def begun(on, mode=0):
    assert cuda.cudaStreamBeginCapture(on, mode) == 0
def ended(on):
    out = void()
    return cuda.cudaStreamEndCapture(on, ctypes.byref(out)), out
"""


def run(text: str, *, late: bool = True, mib: int = 16) -> str:
    environment = device.environment(mib << 20, late=late, tells=False)
    environment["PYTHONPATH"] = ""  # neither PyTorch nor cupy is available
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(text)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(autouse=True, scope="module")
def _toolkit() -> None:
    nvcc = find_nvcc()
    if nvcc is None or "release 13" not in nvcc.version:
        pytest.skip("the device is CUDA 13's")


def test_work_is_done_when_a_caller_waits_for_it() -> None:
    run("""
        at, s = word(), stream()
        assert add(at, 3, s) == 0 and value(at) == 0
        assert cuda.cudaStreamSynchronize(s) == 0 and value(at) == 3
    """)


def test_a_stream_waits_for_an_event_of_another() -> None:
    run("""
        at, s, t, e = word(), stream(), stream(), event()
        add(at, 1, s), cuda.cudaEventRecord(e, s)
        cuda.cudaStreamWaitEvent(t, e, 0), add(at, 2, t)
        cuda.cudaStreamSynchronize(t)
        assert value(at) == 3
    """)


def test_a_capture_keeps_work_and_a_replay_does_it() -> None:
    run("""
        at, s = word(), stream()
        begun(s)
        assert add(at, 2, s) == 0
        code, graph = ended(s)
        cuda.cudaStreamSynchronize(s)
        assert code == 0 and value(at) == 0
        replayed = made(cuda.cudaGraphInstantiateWithFlags, graph, ctypes.c_ulonglong(0))
        for _ in range(3):
            cuda.cudaGraphLaunch(replayed, s)
        cuda.cudaStreamSynchronize(s)
        assert value(at) == 6
    """)


def test_a_forked_stream_must_be_joined() -> None:
    run(f"""
        at = word()
        for joined in (False, True):
            s, t, e, f = stream(), stream(), event(), event()
            begun(s)
            cuda.cudaEventRecord(e, s), cuda.cudaStreamWaitEvent(t, e, 0), add(at, 1, t)
            if joined:
                cuda.cudaEventRecord(f, t), cuda.cudaStreamWaitEvent(s, f, 0)
            assert ended(s)[0] == (0 if joined else {UNJOINED})
    """)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("cuda.cudaDeviceSynchronize()", UNSUPPORTED),
        ("cuda.cudaMalloc(ctypes.byref(void()), size(4))", UNSUPPORTED),
        ("cuda.cudaStreamSynchronize(s)", UNSUPPORTED),
        ("cuda.cudaStreamQuery(s)", UNSUPPORTED),
        ("cuda.cudaStreamWaitEvent(s, before, 0)", ISOLATION),
        ("add(at, 1, None)", IMPLICIT),
    ],
)
def test_forbidden_calls_end_a_capture(call: str, code: int) -> None:
    run(f"""
        at, s, before = word(), stream(0), event()
        cuda.cudaEventRecord(before, None)
        begun(s)
        found = {call}
        assert found == {code}, found
        assert ended(s)[0] == {INVALIDATED}
    """)


def test_a_fault_is_reported_by_the_next_wait_and_every_later_call() -> None:
    run(f"""
        at, s = word(), stream()
        assert add(at.value + 4096 * 4096, 1, s) == 0
        assert cuda.cudaStreamSynchronize(s) == {ILLEGAL_ADDRESS}
        assert add(at, 1, s) == {ILLEGAL_ADDRESS}
        assert cuda.cudaMalloc(ctypes.byref(void()), size(4)) == {ILLEGAL_ADDRESS}
        assert [cuda.cudaGetLastError() for _ in range(2)] == [{ILLEGAL_ADDRESS}] * 2
        assert value(at) == 0
    """)


def test_the_driver_answers_autosels_calls() -> None:
    said = run(f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from autosel.devices.cuda import libcuda
        told = libcuda.runtime()
        print(told.getDeviceCount(), told.getDeviceProperties(0)["major"], told.deviceGetPCIBusId(0))
    """)
    assert said == "1 9 0000:01:00.0\n"
