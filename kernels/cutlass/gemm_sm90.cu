// gemm_sm90     y = x @ w^T (+ bias) (+ residual)     x[M,K], w[N,K], bias[N], residual[M,N] -> y[M,N]; bf16 or fp16
// lm_head_sm90  logits = x @ w^T                      x[M,d], w[V,d] -> logits[M,V]
//
// bytes   (N K + M K + M N) b, and M N b with a residual, b = 2      FLOPs   2 M N K
// roofline on an H200: M=16, N=K=4096: 33.6 MB at 4.3 TB/s are 7.8 us; M=N=K=4096: 137 GFLOP at 0.78 PFLOP/s are
// 176 us; a node and two latencies come to either.
// knobs   (knobs/gpu/cutlass.py, `hopper`; compiled in, except the last three)
//   AUTOSEL_SWAP       1 up to M2 rows: y^T = w x^T, the weights on the tile's long side, x on its short one
//   AUTOSEL_TILE_M, _N sides of a tile: 64 or 128 rows of w by 16 .. 256 of x; above M2, 64 .. 256 of x and of w
//   AUTOSEL_STAGES     of 64 elements along K: as many as keep an SM's share of the read rate in flight, or as fit
//   AUTOSEL_CLUSTER    2: two CTAs share w's part of a tile by multicast, if one tile reads more than L2 gives
//   AUTOSEL_STREAM_K   1: CTAs may share a tile along K, by CUTLASS's stream-K scheduler
//   split_k            CTAs per tile, if tiles are fewer than the SMs that DRAM needs as readers
//   sms                CTAs that process the tiles: one per SM
//   pdl                launched as a programmatic dependent
// design  CUTLASS's collectives: a warp of TMA loads into a ring of stages, warp groups of wgmma consume it. The
//         epilogue
//   adds bias and residual to the fp32 sums before the one rounding, and stores y by TMA. Tiles of 64 rows: two warp
//   groups in turn, one stores while the other multiplies (ping-pong). Of 128 and more: both on one tile.
//   Split tiles meet in a workspace, whose flags are cleared before each launch: a separate node, which the formula
//   uses only if tiles of 64 rows are too few. Operands that TMA cannot fetch (rows not aligned to 16 bytes) go
//   to plain.cuh.
// tried   without NDEBUG ptxas serialises wgmma (C7510) and spills 8 bytes; with it neither.
//   tests/compile asserts it. Tiles of 8 columns: CUTLASS 4.2 compiles them with 2, 4, 8 stages only, so 16 is the minimum.
//   A decode attention from the same parts was not built. One query row per head fills 1 of wgmma's 64 rows, and a group
//   of 4 to 8 still leaves 7 of 8 empty; K^T Q would fill them, but is also limited by the read rate, which the ring of
//   cuda/attention.cuh already reaches. It would pay from about 64 packed rows on.
// idea    swap and ping-pong at small M: NVIDIA/cutlass, examples 48 and 49; tile order: deepseek-ai/DeepGEMM
// status  compiled; not yet run on silicon
// An assertion is a call, and a call between wgmma instructions serialises them.
#define NDEBUG
// If CTAs share tiles, the scheduler of CUTLASS 4.2 does not compile with programmatic dependent launch.
#if !AUTOSEL_STREAM_K
#define CUTLASS_ENABLE_GDC_FOR_SM90
#endif

#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>

#include "../cuda/workspace.cuh"
#include "product.cuh"

namespace autosel {
namespace {

using namespace cute;

constexpr bool kSwap = AUTOSEL_SWAP;      // weights on the tile's long side
constexpr bool kSplit = AUTOSEL_STREAM_K;  // CTAs may share a tile along K
#ifdef CUTLASS_ENABLE_GDC_FOR_SM90
constexpr bool kWaits = true;  // for the previous kernel, so that it may be launched before that has ended
#else
constexpr bool kWaits = false;
#endif
constexpr int kDepth = 64;                 // elements: one 128-byte row of the swizzle

using Element = std::conditional_t<std::is_same<Half, bf16>::value, cutlass::bfloat16_t, cutlass::half_t>;
using Tile = cute::Shape<Int<AUTOSEL_TILE_M>, Int<AUTOSEL_TILE_N>, Int<kDepth>>;
using Cluster = cute::Shape<Int<AUTOSEL_CLUSTER>, _1, _1>;

// Two warp groups of 64 rows on one tile, or in turn on separate tiles: one stores while the other multiplies.
constexpr bool kCooperative = AUTOSEL_TILE_M >= 128;
using MainSchedule = std::conditional_t<kCooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                                        cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
using EndSchedule = std::conditional_t<kCooperative, cutlass::epilogue::TmaWarpSpecializedCooperative,
                                       cutlass::epilogue::TmaWarpSpecialized>;

// For y^T = w x^T the bias runs along the tile's rows, for y = x w^T along its columns.
using Fusion =
    std::conditional_t<kSwap, cutlass::epilogue::fusion::LinCombPerRowBias<Element, float, Element, Element, float>,
                       cutlass::epilogue::fusion::LinCombPerColBias<Element, float, Element, Element, float>>;
using Out = std::conditional_t<kSwap, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
constexpr int kWide = 8;  // elements of 16 bytes

using End = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
    float, float, Element, Out, kWide, Element, Out, kWide, EndSchedule, Fusion>::CollectiveOp;
using Main = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor, kWide, Element,
    cutlass::layout::ColumnMajor, kWide, float, Tile, Cluster, cutlass::gemm::collective::StageCount<AUTOSEL_STAGES>,
    MainSchedule>::CollectiveOp;
using Scheduler = std::conditional_t<kSplit, cutlass::gemm::StreamKScheduler, cutlass::gemm::PersistentScheduler>;
using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Main, End, Scheduler>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

constexpr int kMostShared = 227 << 10;  // of a CTA, sm_90
static_assert(Kernel::SharedStorageSize <= kMostShared, "stages and tile do not fit shared memory");

// Elements from one row to the next; a single row takes any multiple of 16 bytes.
template <class T> int64_t pitch(const Matrix<T>& m) {
  return m.rows > 1 ? m.stride : (m.columns + kWide - 1) / kWide * kWide;
}
template <class T> cute::Stride<int64_t, _1, int64_t> by_rows(const Matrix<T>& m) { return {pitch(m), _1{}, 0}; }

// y or the residual in the order of the product: [m, n] as stored, or transposed.
template <class T> typename Kernel::StrideD as_output(const Matrix<T>& m) {
  if constexpr (kSwap) return {_1{}, m.at ? pitch(m) : int64_t(0), 0};
  else return {m.at ? pitch(m) : int64_t(0), _1{}, 0};
}

// How CTAs share tiles, if they do: a tile's K in `split` equal parts, or with 1 all tiles' K as one line cut into
// equal parts for all CTAs.
template <class K, class Arguments> void share(Arguments& scheduler, int split) {
  if constexpr (kSplit) {
    using Mode = typename K::TileScheduler::Params::DecompositionMode;
    scheduler.splits = split;
    scheduler.decomposition_mode = split > 1 ? Mode::SplitK : Mode::StreamK;
  }
}

typename Kernel::Arguments arguments(const Operands& o, int64_t split, int64_t sms, const Stream& stream) {
  auto element = [](const Half* p) { return reinterpret_cast<const Element*>(p); };
  const Matrix<const Half>&a = kSwap ? o.w : o.x, &b = kSwap ? o.x : o.w;
  typename Kernel::Arguments args{};
  args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  args.problem_shape = {int(a.rows), int(b.rows), int(a.columns), 1};
  args.mainloop.ptr_A = element(a.at), args.mainloop.dA = by_rows(a);
  args.mainloop.ptr_B = element(b.at), args.mainloop.dB = by_rows(b);
  args.epilogue.thread.alpha = 1.0f;
  args.epilogue.thread.beta = o.extras.residual.at ? 1.0f : 0.0f;
  args.epilogue.thread.bias_ptr = element(o.extras.bias);
  // Without a residual none is read, but the descriptor needs an address: that of y.
  args.epilogue.ptr_C = element(o.extras.residual.at ? o.extras.residual.at : o.y.at);
  args.epilogue.dC = o.extras.residual.at ? as_output(o.extras.residual) : as_output(o.y);
  args.epilogue.ptr_D = reinterpret_cast<Element*>(o.y.at), args.epilogue.dD = as_output(o.y);
  args.hw_info.device_id = stream.device(), args.hw_info.sm_count = int(sms);
  share<Kernel>(args.scheduler, int(split));
  return args;
}

void succeed(cutlass::Status status, const char* what) {
  if (status != cutlass::Status::kSuccess)
    AUTOSEL_THROW(RuntimeError) << what << ": " << cutlass::cutlassGetStatusString(status);
}

void gemm_sm90(TensorView x, TensorView w, Optional<TensorView> bias, Optional<TensorView> residual, TensorView y,
               int64_t split, int64_t sms, int64_t pdl) {
  const Operands o = operands(x, w, bias, residual, y);
  AUTOSEL_CHECK(split >= 1 && split <= 64 && (split == 1 || kSplit), "split_k is " << split);
  AUTOSEL_CHECK(sms >= AUTOSEL_CLUSTER && sms <= 1024, "sms is " << sms);
  Stream stream(x);
  if (!regular(o)) return run_plain(o.x, o.w, o.y, o.extras, stream, pdl != 0);
  const typename Kernel::Arguments args = arguments(o, split, sms, stream);
  succeed(Gemm::can_implement(args), "gemm_sm90");
  const size_t bytes = Kernel::get_workspace_size(args);
  char* room = bytes ? Workspace(stream, bytes, 0).memory<char>() : nullptr;
  if (bytes) succeed(Kernel::initialize_workspace(args, room, stream.get()), "gemm_sm90: workspace");
  typename Kernel::Params params = Kernel::to_underlying_arguments(args, room);
  permit_shared(reinterpret_cast<const void*>(cutlass::device_kernel<Kernel>), stream, Kernel::SharedStorageSize);
  succeed(Gemm::run(params, stream.get(), nullptr, kWaits && pdl != 0), "gemm_sm90: launch");
}

// The arguments of lm_head; logits only.
void lm_head_sm90(TensorView x, TensorView w, int64_t greedy, TensorView logits, int64_t split, int64_t sms,
                  int64_t pdl) {
  AUTOSEL_CHECK(greedy == 0, "gives logits, not tokens");
  gemm_sm90(x, w, Optional<TensorView>{}, Optional<TensorView>{}, logits, split, sms, pdl);
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(gemm_sm90, autosel::gemm_sm90);
AUTOSEL_EXPORT(lm_head_sm90, autosel::lm_head_sm90);
