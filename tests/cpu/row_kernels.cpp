// Every row kernel in one source: the instruction sets this machine would not choose are tested by one compilation each.
#include "../../kernels/cpu/add_rmsnorm.cpp"
#include "../../kernels/cpu/geglu.cpp"
#include "../../kernels/cpu/rmsnorm.cpp"
#include "../../kernels/cpu/rope.cpp"
#include "../../kernels/cpu/sample.cpp"
#include "../../kernels/cpu/swiglu.cpp"
