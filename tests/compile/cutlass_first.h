// CuTe, compiled for this CPU, ahead of the harness that redefines the language for the kernel's own source.
#pragma once
#define cudaLaunchKernelEx cuda_runtime_launch  // the harness brings its own
#include <cute/tensor.hpp>
#undef cudaLaunchKernelEx
