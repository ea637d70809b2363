"""A simulated CUDA device for a whole process: PyTorch's CUDA build, cupy, Triton and autosel as they are on a
GPU's machine, over a runtime, a driver and an NVML whose kernels are PTX that a CPU runs (tests/compile/ptx/).

    python -m tests.rehearsal ./run gpu --device cuda --stage parity --unit rmsnorm

What this shows is the host's side: that devices are found, modules load, streams, events and graphs are used as CUDA
wants them, faults are contained. It knows nothing of time: no figure that it prints is one of a GPU, and its device is
called "PTX on a CPU" wherever a device is named.
"""
