// The AMX tiles of the calling thread, for a test that looks at them between calls.
#include "../../kernels/cpu/amx.h"

using namespace autosel;

extern "C" {
bool permitted() { return by_amx<bf16>(kFewestForAmx); }
#if defined(AUTOSEL_AMX)
AUTOSEL_WITH_AMX void configure(const void* shapes) { amx_fence(), _tile_loadconfig(shapes); }
AUTOSEL_WITH_AMX void configuration(void* shapes) { _tile_storeconfig(shapes), amx_fence(); }
AUTOSEL_WITH_AMX void release() { _tile_release(); }
#endif
}
