// Every attention kernel in one source: the instruction sets this machine would not choose are tested by one compilation.
#include "../../kernels/cpu/kv_append.cpp"
#include "../../kernels/cpu/attn_decode.cpp"
#include "../../kernels/cpu/paged_attn_decode.cpp"
#include "../../kernels/cpu/attn_prefill.cpp"
