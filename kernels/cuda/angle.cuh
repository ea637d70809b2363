// The rotation of a position: in double, in half turns, so that it is exact for positions of any size (rope.cu).
#pragma once
#include <cstdint>

namespace autosel {

__device__ __forceinline__ void cos_sin(int64_t position, float frequency, float& cos, float& sin) {
  double half_turns = double(position) * double(frequency) * 0.31830988618379067154;
  half_turns -= 2.0 * rint(0.5 * half_turns);
  sincospif(float(half_turns), &sin, &cos);
}

}  // namespace autosel
