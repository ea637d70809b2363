// SiLU and the two GELUs in fp32, in forms that do not overflow or cancel as the textbook forms do.
#pragma once
#include "types.cuh"

namespace autosel {

// g / (1 + exp(-g)): exp(-g) may overflow to infinity, and g / inf is 0, which is correct.
__device__ __forceinline__ float silu(float g) { return g / (1.0f + expf(-g)); }

// g/2 (1 + erf(g / sqrt 2)) = g/2 erfc(-g / sqrt 2): 1 + erf cancels for negative g.
__device__ __forceinline__ float gelu_erf(float g) { return 0.5f * g * erfcf(-0.70710678f * g); }

// g/2 (1 + tanh(u)) = g / (1 + exp(-2u)), u = sqrt(2/pi) (g + 0.044715 g^3)
__device__ __forceinline__ float gelu_tanh(float g) {
  const float u = 0.79788456f * (g + 0.044715f * g * g * g);
  return g / (1.0f + expf(-2.0f * u));
}

enum Activation { kSilu, kGeluErf, kGeluTanh };  // gate_up's `activation`

__device__ __forceinline__ float activate(int kind, float g) {
  return kind == kSilu ? silu(g) : kind == kGeluErf ? gelu_erf(g) : gelu_tanh(g);
}

}  // namespace autosel
