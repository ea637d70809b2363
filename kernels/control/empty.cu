// empty   the same for nvcc
#include "empty.cpp"
