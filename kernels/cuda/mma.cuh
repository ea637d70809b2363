// Tensor cores' smallest tile, 16 x 8 over 16 (sm_80), and the loads that lay out its operands. Without PTX, shuffles
// do the same, so that a run on a CPU exchanges exactly the elements that the instructions do.
//
// Lane 4 g + t holds of A[16][16] words (two elements) at rows g and g + 8, columns 2 t and 2 t + 8; of B[16][8] words
// at rows 2 t and 2 t + 8, column g; of C[16][8] elements at rows g and g + 8, columns 2 t and 2 t + 1 (PTX ISA,
// mma.m16n8k16).
#pragma once
#include "reduce.cuh"

namespace autosel {

struct TileA { uint32_t w[4]; };  // (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)
struct TileB { uint32_t w[2]; };
struct TileC { float v[4] = {}; };  // (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)

#ifdef __CUDA_ARCH__
#define AUTOSEL_MMA(type)                                                                                       \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                           \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
               : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])                                         \
               : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "r"(b.w[0]), "r"(b.w[1]))
__device__ __forceinline__ void multiply(bf16, TileC& c, const TileA& a, const TileB& b) { AUTOSEL_MMA("bf16"); }
__device__ __forceinline__ void multiply(f16, TileC& c, const TileA& a, const TileB& b) { AUTOSEL_MMA("f16"); }
#undef AUTOSEL_MMA
#else
template <class T> __device__ void multiply(T, TileC& c, const TileA& a, const TileB& b) {
  const int lane = int(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
  for (int other = 0; other < 4; ++other)
    for (int half = 0; half < 2; ++half) {  // columns of A and rows of B: 2 other, 2 other + 1, and 8 more
      float up[2], down[2], left[2], right[2];
      widen_word(T{}, __shfl_sync(kAll, a.w[2 * half], 4 * g + other), up);
      widen_word(T{}, __shfl_sync(kAll, a.w[2 * half + 1], 4 * g + other), down);
      widen_word(T{}, __shfl_sync(kAll, b.w[half], 4 * (2 * t) + other), left);
      widen_word(T{}, __shfl_sync(kAll, b.w[half], 4 * (2 * t + 1) + other), right);
      for (int e = 0; e < 2; ++e) {
        c.v[0] += up[e] * left[e], c.v[1] += up[e] * right[e];
        c.v[2] += down[e] * left[e], c.v[3] += down[e] * right[e];
      }
    }
}
#endif

// Loads four 8 x 8 tiles of 16-bit elements from shared memory: lane 8 j + r gives the address of row r of tile j; word
// j of lane 4 g + t is that tile's row g, columns 2 t and 2 t + 1, or with Turned its rows 2 t and 2 t + 1 of column g.
template <bool Turned> __device__ __forceinline__ void load_tiles(uint32_t (&w)[4], const void* row) {
#ifdef __CUDA_ARCH__
  const uint32_t at = uint32_t(__cvta_generic_to_shared(row));
  if (Turned)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(at)
                 : "memory");
#elif !defined(__CUDACC__)  // nvcc's pass for the host has no shuffle of a pointer
  assert(uintptr_t(row) % 16 == 0);
  const int lane = int(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
  for (int j = 0; j < 4; ++j) {
    if (Turned) {
      const char* first = __shfl_sync(kAll, static_cast<const char*>(row), 8 * j + 2 * t);
      const char* second = __shfl_sync(kAll, static_cast<const char*>(row), 8 * j + 2 * t + 1);
      uint16_t low, high;
      memcpy(&low, first + 2 * g, 2), memcpy(&high, second + 2 * g, 2);
      w[j] = uint32_t(low) | uint32_t(high) << 16;
    } else {
      memcpy(&w[j], __shfl_sync(kAll, static_cast<const char*>(row), 8 * j + g) + 4 * t, 4);
    }
  }
#endif
}

}  // namespace autosel
