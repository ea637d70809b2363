"""Our Triton kernels (kernels/triton/): one candidate a kernel, for NVIDIA GPUs from compute capability 8.0."""
