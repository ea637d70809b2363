"""autosel's C++ kernels (kernels/cpu/): one candidate per kernel, with the instruction set chosen by CPUID."""
