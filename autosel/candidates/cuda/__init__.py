"""Our own CUDA kernels (kernels/cuda/): one candidate a kernel, compiled for the device's own architecture."""
