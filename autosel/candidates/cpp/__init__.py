"""Our own C++ kernels (kernels/cpu/): one candidate a kernel, the instruction set chosen by CPUID."""
