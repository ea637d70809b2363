"""Simulate a CUDA device for a whole process: PyTorch's CUDA build, cupy, Triton and autosel run unchanged on a
runtime, a driver and an NVML that execute PTX on a CPU (tests/compile/ptx/).

    python -m tests.rehearsal ./run gpu --device cuda --stage parity --unit rmsnorm

It tests the host's side: finding devices, loading modules, the correct use of streams, events and graphs, and the
containment of faults. It does not model time: no figure that it prints is a GPU's, and its device is called "PTX on a
CPU" wherever a device is named.
"""
