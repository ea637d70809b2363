"""autosel's CUDA kernels (kernels/cuda/): one candidate per kernel, compiled for the device's own architecture."""
