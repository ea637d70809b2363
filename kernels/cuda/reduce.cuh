// Sums over a warp and over a block, in an order that never changes: the same inputs give the same bits.
#pragma once
#include "memory.cuh"

namespace autosel {

constexpr unsigned kAll = 0xffffffffu;

// Over `Lanes` neighbouring lanes (a power of two); every lane gets it.
template <int Lanes = kWarp> __device__ __forceinline__ float lanes_sum(float v) {
#pragma unroll
  for (int apart = Lanes / 2; apart > 0; apart /= 2) v += __shfl_xor_sync(kAll, v, apart);
  return v;
}

template <int Lanes = kWarp> __device__ __forceinline__ float lanes_max(float v) {
#pragma unroll
  for (int apart = Lanes / 2; apart > 0; apart /= 2) v = fmaxf(v, __shfl_xor_sync(kAll, v, apart));
  return v;
}

// R sums over `Lanes` neighbouring lanes (powers of two, R <= Lanes); every lane gets all of them. Each step halves the
// sums that a lane still adds up, so that R = 4 over 16 lanes take 8 shuffles instead of 16.
template <int R, int Lanes> __device__ __forceinline__ void lanes_sum_each(float (&v)[R]) {
  if constexpr (R == 1) {
    v[0] = lanes_sum<Lanes>(v[0]);
  } else {
    constexpr int H = R / 2, kApart = Lanes / 2;
    const bool upper = threadIdx.x & kApart;
    float half[H];
#pragma unroll
    for (int i = 0; i < H; ++i) {
      const float given = upper ? v[i] : v[H + i], kept = upper ? v[H + i] : v[i];
      half[i] = kept + __shfl_xor_sync(kAll, given, kApart);
    }
    lanes_sum_each<H, kApart>(half);
#pragma unroll
    for (int i = 0; i < H; ++i) {
      const float other = __shfl_xor_sync(kAll, half[i], kApart);
      v[i] = upper ? other : half[i], v[H + i] = upper ? half[i] : other;
    }
  }
}

// Over the block; every thread gets it. `scratch`: a float a warp. Calls must be a barrier apart.
__device__ __forceinline__ float block_sum(float v, float* scratch) {
  int warps = int(blockDim.x) / kWarp;
  v = lanes_sum(v);
  if (warps == 1) return v;
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = v;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < warps; ++i) sum += scratch[i];
  return sum;
}

}  // namespace autosel
