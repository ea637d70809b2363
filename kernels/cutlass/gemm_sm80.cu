// gemm_sm80     y = x @ w^T (+ bias) (+ residual)     x[M,K], w[N,K], bias[N], residual[M,N] -> y[M,N]; bf16 or fp16
// lm_head_sm80  logits = x @ w^T                      x[M,d], w[V,d] -> logits[M,V]
//
// bytes   (N K + M K + M N) b, and M N b with a residual, b = 2      FLOPs   2 M N K
// roofline on an RTX 5070 Ti: M=16, N=K=4096: 33.6 MB at 824 GB/s are 40.8 us; M=N=K=4096: 137 GFLOP at 99 TFLOP/s are
// 1.39 ms; a node and two latencies come to either.
// knobs   (knobs/gpu/cutlass.py, `ampere`; the first three compiled in)
//   AUTOSEL_ROWS, _COLUMNS  sides of a tile: 64 or 128 rows of w, 16 .. 128 rows of x
//   AUTOSEL_STAGES          of 64 elements along K: an SM's share of the read rate in flight, if shared memory holds it
//   split_k                 CTAs per tile, if tiles are too few readers for DRAM, or leave the last wave half empty
//   pdl                     launched as a programmatic dependent: the first weights are loaded while x is computed
// design  y^T = w x^T at every M, in CuTe's layouts: cp.async fills a swizzled ring, ldmatrix reads it, mma.m16n8k16
//   accumulates in fp32. Four warps share w's rows; from 128 columns on, two also share x's. One barrier per stage. Split
//   tiles store their sums in a workspace and the last CTA to arrive adds them in order: one launch, the same bits each
//   time. The tile goes through shared memory to become rows of y, where bias and residual are added before the one
//   rounding. Tiles are processed in groups of 8 of w, so that a wave reads few rows of either operand.
//   Operands that are not in rows of whole 16-byte vectors go to plain.cuh.
// tried   the kernel's body also compiled in nvcc's pass for the host: 8 s more, for code that this pass never calls
// idea    multistage pipeline: NVIDIA/cutlass, CuTe's tutorial; swapped operands: FlashInfer, DeepGEMM
// status  compiled and emulated; not yet run on silicon
#include <cute/tensor.hpp>

#include "../cuda/mma.cuh"
#include "../cuda/workspace.cuh"
#include "product.cuh"

#ifndef AUTOSEL_ROWS
#define AUTOSEL_ROWS 128
#endif
#ifndef AUTOSEL_COLUMNS
#define AUTOSEL_COLUMNS 16
#endif
#ifndef AUTOSEL_STAGES
#define AUTOSEL_STAGES 3
#endif

// --- instructions, as CuTe asks for them -----------------------------------------------------------------------------

namespace autosel {

// Not in nvcc's pass for the host: it has no such instructions, and would spend long compiling code that it never
// calls.
#if defined(__CUDA_ARCH__) || !defined(__CUDACC__)
#define AUTOSEL_RUNS 1
#endif

template <class T> struct Multiply16x8x16 {
  using DRegisters = float[4];
  using ARegisters = uint32_t[4];
  using BRegisters = uint32_t[2];
  using CRegisters = float[4];
  CUTE_HOST_DEVICE static void fma(float& d0, float& d1, float& d2, float& d3, const uint32_t& a0, const uint32_t& a1,
                                   const uint32_t& a2, const uint32_t& a3, const uint32_t& b0, const uint32_t& b1,
                                   const float& c0, const float& c1, const float& c2, const float& c3) {
#ifdef AUTOSEL_RUNS
    TileC c{{c0, c1, c2, c3}};
    multiply(T{}, c, TileA{{a0, a1, a2, a3}}, TileB{{b0, b1}});
    d0 = c.v[0], d1 = c.v[1], d2 = c.v[2], d3 = c.v[3];
#endif
  }
};

struct LoadTiles {
  using SRegisters = cute::uint128_t[1];
  using DRegisters = uint32_t[4];
  CUTE_HOST_DEVICE static void copy(const cute::uint128_t& from, uint32_t& w0, uint32_t& w1, uint32_t& w2,
                                    uint32_t& w3) {
#ifdef AUTOSEL_RUNS
    uint32_t w[4];
    load_tiles<false>(w, &from);
    w0 = w[0], w1 = w[1], w2 = w[2], w3 = w[3];
#endif
  }
};

}  // namespace autosel

template <class T>
struct cute::MMA_Traits<autosel::Multiply16x8x16<T>> : cute::MMA_Traits<cute::SM80_16x8x16_F32F16F16F32_TN> {
  using ValTypeA = T;
  using ValTypeB = T;
};
template <> struct cute::Copy_Traits<autosel::LoadTiles> : cute::Copy_Traits<cute::SM75_U32x4_LDSM_N> {};

// --- the tile --------------------------------------------------------------------------------------------------------

namespace autosel {
namespace {

using namespace cute;

constexpr int kRows = AUTOSEL_ROWS, kColumns = AUTOSEL_COLUMNS, kStages = AUTOSEL_STAGES;  // of w, of x
constexpr int kDepth = 64;                                                                // 128 bytes of either
constexpr int kWarpsDown = 4, kWarpsAcross = kColumns > 64 ? 2 : 1, kThreads = kWarpsDown * kWarpsAcross * kWarp;
constexpr int kWide = kVec<Half>;
static_assert(kRows % (16 * kWarpsDown) == 0 && kColumns % (16 * kWarpsAcross) == 0, "whole instructions a warp");
static_assert(kStages >= 2, "one tile is multiplied while the next comes");

// Eight rows of 128 bytes, their 16-byte pieces swapped by row: neither copies nor loads have bank conflicts.
using Rows8 = Layout<cute::Shape<_8, Int<kDepth>>, cute::Stride<Int<kDepth>, _1>>;
using Atom = decltype(composition(Swizzle<3, 3, 3>{}, Rows8{}));
using RingW = decltype(tile_to_shape(Atom{}, cute::Shape<Int<kRows>, Int<kDepth>, Int<kStages>>{}));
using RingX = decltype(tile_to_shape(Atom{}, cute::Shape<Int<kColumns>, Int<kDepth>, Int<kStages>>{}));
using Product = TiledMMA<MMA_Atom<Multiply16x8x16<Half>>, Layout<cute::Shape<Int<kWarpsDown>, Int<kWarpsAcross>, _1>>,
                         cute::Tile<Int<16 * kWarpsDown>, Int<16 * kWarpsAcross>, _16>>;
// A thread copies 16 bytes, eight threads copy a row.
using Copies = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, Half>{},
                                        Layout<cute::Shape<Int<kThreads / 8>, _8>, cute::Stride<_8, _1>>{},
                                        Layout<cute::Shape<_1, Int<kWide>>>{}));

constexpr int kPitch = kRows + 4;  // floats: lanes 4 g + t store C at (2 t, g) without bank conflicts
constexpr size_t kRingBytes = sizeof(Half) * size_t(cosize_v<RingW> + cosize_v<RingX>);
constexpr size_t kEndBytes = sizeof(float) * kPitch * kColumns + 16;
constexpr size_t kSharedBytes = kRingBytes > kEndBytes ? kRingBytes : kEndBytes;
constexpr int kSums = kRows * kColumns;  // of a tile
constexpr int kGroup = 8;  // consecutive tiles of w, each multiplied by all of x, so that both stay in L2

struct Parts {
  int64_t down, across;  // tiles: of w's rows, of x's
  int split;             // CTAs per tile
  float* sums;           // [tile][split][kSums]
  unsigned* counters;    // [tile]
};

#ifdef AUTOSEL_RUNS
// The CTA's tile: groups of kGroup tiles of w, and in each group one tile of x after the other.
__device__ __forceinline__ void place(const Parts& parts, int64_t& down, int64_t& across) {
  const int64_t whole = kGroup * parts.across, group = int64_t(blockIdx.x) / whole, in = int64_t(blockIdx.x) % whole;
  const int64_t left = parts.down - group * kGroup, wide = left < kGroup ? left : kGroup;
  down = group * kGroup + in % wide, across = in / wide;
}

// Rows first .. of m as a tensor: `copy_tile` tests what is beyond its end and never reads it.
__device__ __forceinline__ auto rows_from(const Matrix<const Half>& m, int64_t first) {
  return make_tensor(make_gmem_ptr(m.at + first * m.stride), make_shape(m.rows - first, m.columns),
                     make_stride(m.stride, _1{}));
}

// Copies a tile's rows at depth k to a slot of the ring; zeros beyond the matrix.
template <int Tall, class From, class To>
__device__ __forceinline__ void copy_tile(const From& from, To&& to, int64_t k) {
  static_assert(Tall % (kThreads / 8) == 0, "every thread copies as much");
  const auto mine = Copies{}.get_slice(int(threadIdx.x));
  const auto at = mine.partition_D(make_identity_tensor(cute::Shape<Int<Tall>, Int<kDepth>>{}));
  auto slot = mine.partition_D(to);
#pragma unroll
  for (int i = 0; i < size<1>(slot); ++i) {
    const int row = get<0>(at(0, i, 0));
    const int64_t depth = k + get<1>(at(0, i, 0));
    const bool inside = row < size<0>(from) && depth < size<1>(from);
    copy_async(&slot(0, i, 0), inside ? &from(row, depth) : &from(0, 0), inside);
  }
}

template <class Sums> __device__ __forceinline__ bool join(const Parts& parts, int64_t tile, Sums& sums) {
  float* mine = parts.sums + (tile * parts.split + blockIdx.z) * kSums + threadIdx.x;
#pragma unroll
  for (int i = 0; i < size(sums); ++i) mine[i * kThreads] = sums(i);
  unsigned* flag = reinterpret_cast<unsigned*>(shared_memory() + kSharedBytes - 16);
  if (!last_to_arrive(parts.counters + tile, unsigned(parts.split), flag)) return false;
  const float* all = parts.sums + tile * parts.split * kSums + threadIdx.x;
#pragma unroll
  for (int i = 0; i < size(sums); ++i) sums(i) = __ldcg(all + i * kThreads);
  for (int s = 1; s < parts.split; ++s)
#pragma unroll
    for (int i = 0; i < size(sums); ++i) sums(i) += __ldcg(all + int64_t(s) * kSums + i * kThreads);
  return true;
}

// Stores the tile's sums, plus bias and residual, as rows of y: through shared memory, 16 bytes at a time.
template <class Sums, class Where>
__device__ __forceinline__ void store_tile(const Operands& o, int64_t n0, int64_t m0, const Sums& sums,
                                           const Where& where) {
  float* laid = reinterpret_cast<float*>(shared_memory());
  __syncthreads();
#pragma unroll
  for (int i = 0; i < size(sums); ++i) laid[get<1>(where(i)) * kPitch + get<0>(where(i))] = sums(i);
  __syncthreads();
  for (int v = int(threadIdx.x); v < kColumns * (kRows / kWide); v += kThreads) {
    const int64_t m = m0 + v / (kRows / kWide), n = n0 + v % (kRows / kWide) * kWide;
    if (m >= o.y.rows || n >= o.y.columns) continue;
    const float* from = laid + v / (kRows / kWide) * kPitch + v % (kRows / kWide) * kWide;
    float sum[kWide], more[kWide];
#pragma unroll
    for (int e = 0; e < kWide; ++e) sum[e] = from[e];
    if (o.extras.bias) {
      widen<Half>(load_resident(o.extras.bias + n), more);
#pragma unroll
      for (int e = 0; e < kWide; ++e) sum[e] += more[e];
    }
    if (o.extras.residual.at) {
      widen<Half>(load_resident(o.extras.residual.row(m) + n), more);
#pragma unroll
      for (int e = 0; e < kWide; ++e) sum[e] += more[e];
    }
    store(o.y.row(m) + n, narrow<Half>(sum));
  }
}

__device__ __forceinline__ void multiply_tile(const Operands& o, const Parts& parts) {
  release_dependents();
  int64_t down, across;
  place(parts, down, across);
  const int64_t n0 = down * kRows, m0 = across * kColumns;
  const int tiles = int((o.w.columns + kDepth - 1) / kDepth);
  const int begin = int(int64_t(tiles) * blockIdx.z / parts.split);
  const int end = int(int64_t(tiles) * (blockIdx.z + 1) / parts.split);

  const auto w = rows_from(o.w, n0), x = rows_from(o.x, m0);
  auto* ring = reinterpret_cast<Half*>(shared_memory());
  auto ring_w = make_tensor(make_smem_ptr(ring), RingW{});
  auto ring_x = make_tensor(make_smem_ptr(ring + cosize_v<RingW>), RingX{});
  auto fetch_w = [&](int t) { copy_tile<kRows>(w, ring_w(_, _, (t - begin) % kStages), int64_t(t) * kDepth); };
  auto fetch_x = [&](int t) { copy_tile<kColumns>(x, ring_x(_, _, (t - begin) % kStages), int64_t(t) * kDepth); };

  const auto mine = Product{}.get_slice(int(threadIdx.x));
  const auto load_w = make_tiled_copy_A(Copy_Atom<LoadTiles, Half>{}, Product{});
  const auto load_x = make_tiled_copy_B(Copy_Atom<LoadTiles, Half>{}, Product{});
  const auto from_w = load_w.get_slice(int(threadIdx.x)).partition_S(ring_w);
  const auto from_x = load_x.get_slice(int(threadIdx.x)).partition_S(ring_x);
  auto a = mine.partition_fragment_A(ring_w(_, _, 0));
  auto b = mine.partition_fragment_B(ring_x(_, _, 0));
  auto to_a = load_w.get_slice(int(threadIdx.x)).retile_D(a);
  auto to_b = load_x.get_slice(int(threadIdx.x)).retile_D(b);
  auto sums = partition_fragment_C(Product{}, cute::Shape<Int<kRows>, Int<kColumns>>{});
  clear(sums);

  // Weights are constants: they are loaded while x is computed.
#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead)
    if (begin + ahead < end) fetch_w(begin + ahead);
  wait_for_producers();
#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead) {
    if (begin + ahead < end) fetch_x(begin + ahead);
    commit_copies();
  }
  for (int t = begin; t < end; ++t) {
    await_copies<kStages - 2>();
    __syncthreads();  // tile t has arrived for all, and all are done with the slot that is filled next
    if (t + kStages - 1 < end) fetch_w(t + kStages - 1), fetch_x(t + kStages - 1);
    commit_copies();
    const int slot = (t - begin) % kStages;
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      copy(load_w, from_w(_, _, k, slot), to_a(_, _, k));
      copy(load_x, from_x(_, _, k, slot), to_b(_, _, k));
      gemm(Product{}, a(_, _, k), b(_, _, k), sums);
    }
  }
  await_copies<0>();
  __syncthreads();
  if (parts.split > 1 && !join(parts, down * parts.across + across, sums)) return;
  store_tile(o, n0, m0, sums, mine.partition_C(make_identity_tensor(cute::Shape<Int<kRows>, Int<kColumns>>{})));
}

#endif

__global__ void __launch_bounds__(kThreads) product_tiles(Operands o, Parts parts) {
#ifdef AUTOSEL_RUNS
  multiply_tile(o, parts);
#endif
}

// --- host ------------------------------------------------------------------------------------------------------------

void gemm_sm80(TensorView x, TensorView w, Optional<TensorView> bias, Optional<TensorView> residual, TensorView y,
               int64_t split, int64_t pdl) {
  const Operands o = operands(x, w, bias, residual, y);
  AUTOSEL_CHECK(split >= 1 && split <= 64, "split_k is " << split);
  Stream stream(x);
  if (!regular(o)) return run_plain(o.x, o.w, o.y, o.extras, stream, pdl != 0);
  Parts parts{(o.w.rows + kRows - 1) / kRows, (o.x.rows + kColumns - 1) / kColumns, int(split), nullptr, nullptr};
  const int64_t tiles = parts.down * parts.across, deep = (o.w.columns + kDepth - 1) / kDepth;
  AUTOSEL_CHECK(tiles <= kMostElements, "more than 2^31 - 1 tiles");
  parts.split = int(std::min(split, deep));  // no CTA without a part of K
  if (parts.split > 1) {
    Workspace room(stream, size_t(tiles) * parts.split * kSums * sizeof(float), size_t(tiles));
    parts.sums = room.memory<float>(), parts.counters = room.counters();
  }
  launch({dim3(unsigned(tiles), 1, unsigned(parts.split)), unsigned(kThreads), kSharedBytes, pdl != 0}, stream,
         product_tiles, o, parts);
}

// The arguments of lm_head; logits only.
void lm_head_sm80(TensorView x, TensorView w, int64_t greedy, TensorView logits, int64_t split, int64_t pdl) {
  AUTOSEL_CHECK(greedy == 0, "gives logits, not tokens");
  gemm_sm80(x, w, Optional<TensorView>{}, Optional<TensorView>{}, logits, split, pdl);
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(gemm_sm80, autosel::gemm_sm80);
AUTOSEL_EXPORT(lm_head_sm80, autosel::lm_head_sm80);
