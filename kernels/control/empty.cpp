// empty   a candidate that does nothing: the control of a native candidate that fails (autosel/candidates/control.py)
//
// It includes what every kernel includes, so that it compiles where a kernel can compile. It takes any arguments.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_empty(void*, const TVMFFIAny*, int32_t, TVMFFIAny*) { return 0; }
