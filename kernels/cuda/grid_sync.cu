// A grid barrier by cooperative groups, to compare with the counter in memory of probes.cu. In a separate file because
// it needs a header of the toolkit, which not every machine has.
//
// status  compiled and emulated; not yet run on silicon

#if !defined(AUTOSEL_EMULATED)
#define _CG_LIMIT_INCLUDED_DEPENDENCIES  // no libcu++, which NVRTC may not find
#include <cooperative_groups.h>
#endif

// All blocks meet `rounds` times. The launch is cooperative, so that all are resident.
extern "C" __global__ void probe_grid_sync(unsigned rounds) {
  auto grid = cooperative_groups::this_grid();
  for (unsigned r = 0; r < rounds; ++r) grid.sync();
}
