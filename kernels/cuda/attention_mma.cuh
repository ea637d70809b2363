// Decode attention on tensor cores, for more packed query rows than CUDA cores can keep up with: 16 at a time.
//
// Uses the tasks, sources and the end of attention.cuh; the difference is the warp's block of 16 keys:
//   ring     its rows are read by ldmatrix, so a lane also copies for others; a barrier of the warp keeps the order. Rows
//            are an odd number of 16-byte pieces apart: eight of them are in eight different bank groups.
//   scores   C[16 rows][16 keys] = Q K^T: Q's tiles stay in registers; K's rows, as stored, are the columns of B.
//   softmax  as in attention.cuh; the four lanes of a group hold the scores of a row.
//   values   O[16 rows][D] += P V: P is C's registers again, rounded to the cache's type; V's tiles are loaded transposed.
// P is rounded before it multiplies V, as in every tensor-core attention; the contract allows it.
#pragma once
#include "attention.cuh"
#include "mma.cuh"

namespace autosel {
namespace attention {

constexpr int kTileRows = 16, kTileKeys = 16;

// The places of the keys of which a lane copies pieces, read one block before it copies: its `own` first key of each
// turn's `step`. All lanes of a warp call it.
template <class Source, int Turns> struct BlockAhead;

template <class KV, int Turns> struct BlockAhead<Contiguous<KV>, Turns> : Contiguous<KV>::template Ahead<Turns> {
  using From = typename Contiguous<KV>::template Ahead<Turns>;
  __device__ __forceinline__ void look(const Contiguous<KV>& c, int b, int64_t h, int64_t base, int own, int step, int end) {
    From::look(c, b, h, base + own, step, end);
  }
  __device__ __forceinline__ Rows<KV> rows(const Contiguous<KV>& c, int64_t h, int turn, int, int step, int end) const {
    return From::rows(c, h, turn, step, end);
  }
};

// A lane locates one key and passes it to the lanes that copy it: two registers and one division. A lane that locates
// all of its keys needs 32, and 16 for heads of 256 channels, and spilled them.
template <class KV, int Turns> struct BlockAhead<Paged<KV>, Turns> {
  Place found;
  __device__ __forceinline__ void look(const Paged<KV>& p, int b, int64_t, int64_t base, int, int, int end) {
    const int64_t key = base + int(threadIdx.x) % kTileKeys;
    found = key < end ? p.find(b, int(key)) : Place{-1, 0};
  }
  __device__ __forceinline__ Rows<KV> rows(const Paged<KV>& p, int64_t h, int turn, int own, int step, int) const {
    const int from = turn * step + own;
    Place at{__shfl_sync(kAll, found.outer, from), __shfl_sync(kAll, found.inner, from)};
    const bool there = at.outer >= 0;
    if (!there) at = {0, 0};
    return {p.key_row(at, h), p.value_row(at, h), there};
  }
};

// Wide: most channels, D or more
template <class T, int Wide, class Source, bool Aligned> struct AttendTiles {
  static constexpr int kPieces = Wide / kVec<T>, kPitch = kPieces | 1;       // 16-byte pieces of a row; between rows
  static constexpr size_t kSlotBytes = size_t(2) * kTileKeys * kPitch * 16;  // of one warp
  static constexpr int kAcross = kPieces <= 8 ? 8 : kPieces <= 16 ? 16 : 32;  // lanes that copy a row, some idle
  static constexpr int kStep = kWarp / kAcross, kTurns = kTileKeys / kStep;   // keys at once; keys a lane copies
  using Ahead = BlockAhead<Source, kTurns>;

  const Queries<T>& a;
  const Source& source;
  const Task& task;
  int lane, warp, g, t;
  uint4* ring;  // this warp's
  TileA q[Wide / 16];
  TileC o[Wide / 8];
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // of rows g and g + 8
  int lo[2], hi[2];

  __device__ __forceinline__ AttendTiles(const Queries<T>& queries, const Source& from, const Task& given)
      : a(queries), source(from), task(given) {
    lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, g = lane / 4, t = lane % 4;
    ring = reinterpret_cast<uint4*>(shared_memory()) + warp * (a.slots * kSlotBytes / 16);
  }

  __device__ __forceinline__ void take_queries() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = g + 8 * half, row = task.row0 + (r < task.rows ? r : task.rows - 1), s = row % a.positions;
      const T* from = a.q + task.b * a.q_batch + (task.h * a.group + row / a.positions) * a.q_head + s * a.q_token;
      hi[half] = task.length - a.positions + s, lo[half] = a.window ? hi[half] - a.window + 1 : 0;
#pragma unroll
      for (int i = 0; i < Wide / 16; ++i)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int d = 16 * i + 8 * side + 2 * t;
          T pair[2] = {d < a.width ? from[d] : T(0.0f), d + 1 < a.width ? from[d + 1] : T(0.0f)};
          memcpy(&q[i].w[half + 2 * side], pair, 4);
        }
    }
  }

  __device__ __forceinline__ uint4* at(int slot, int which, int key, int piece) const {
    return ring + slot * (kSlotBytes / 16) + (which * kTileKeys + key) * kPitch + piece;
  }

  __device__ __forceinline__ void look(Ahead& ahead, int64_t base) const {
    ahead.look(source, task.b, task.h, base, lane / kAcross, kStep, task.end);
  }

  // A block's keys, for all lanes.
  __device__ __forceinline__ void fill(int slot, const Ahead& ahead) const {
    const int piece = lane % kAcross, own = lane / kAcross, from = piece * kVec<T>;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const Rows<T> rows = ahead.rows(source, task.h, turn, own, kStep, task.end);
      if (piece >= kPieces) continue;
      const int key = turn * kStep + own, left = rows.there ? a.width - from : 0;
      if (Aligned) {
        copy_async(at(slot, 0, key, piece), rows.k + from, left > 0);
        copy_async(at(slot, 1, key, piece), rows.v + from, left > 0);
      } else {
        *at(slot, 0, key, piece) = load_elements(rows.k + from, left);
        *at(slot, 1, key, piece) = load_elements(rows.v + from, left);
      }
    }
  }

  template <bool Masked> __device__ __forceinline__ void work(int slot, int base) {
    TileC s[2];  // keys 0 .. 7 and 8 .. 15
#pragma unroll
    for (int i = 0; i < Wide / 16; ++i) {
      uint32_t k[4];  // keys 0 .. 7 and 8 .. 15, each with channels 0 .. 7 and 8 .. 15
      load_tiles<false>(k, at(slot, 0, lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
      multiply(T{}, s[0], q[i], TileB{{k[0], k[1]}});
      multiply(T{}, s[1], q[i], TileB{{k[2], k[3]}});
    }
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s[side].v[e];
        x = a.softcap != 0 ? a.softcap * tanhf(x * a.scale) : x * a.scale;
        if (Masked) {
          const int key = base + 8 * side + 2 * t + e % 2;
          if (key >= task.end || key < lo[e / 2] || key > hi[e / 2]) x = -INFINITY;
        }
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = fmaxf(fmaxf(s[0].v[2 * half], s[0].v[2 * half + 1]), fmaxf(s[1].v[2 * half], s[1].v[2 * half + 1]));
      most = fmaxf(lanes_max<4>(most), top[half]);
      const float base_of = most == -INFINITY ? 0.0f : most;  // nothing seen yet: exp2 of -inf, not of NaN
      const float shrink = exp2_flushed(top[half] - base_of);
      top[half] = most, sum[half] *= shrink;
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[side].v[2 * half + e];
          x = exp2_flushed(x - base_of), sum[half] += x;
        }
      if (__any_sync(kAll, shrink != 1.0f)) {
#pragma unroll
        for (int i = 0; i < Wide / 8; ++i) o[i].v[2 * half] *= shrink, o[i].v[2 * half + 1] *= shrink;
      }
    }
    TileA p;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      p.w[2 * side] = narrow_word(T{}, s[side].v), p.w[2 * side + 1] = narrow_word(T{}, s[side].v + 2);
    }
#pragma unroll
    for (int i = 0; i < Wide / 16; ++i) {
      uint32_t v[4];  // keys 0 .. 7 and 8 .. 15 of channels 0 .. 7, then of 8 .. 15
      load_tiles<true>(v, at(slot, 1, lane % 16, 2 * i + lane / 16));
      multiply(T{}, o[2 * i], p, TileB{{v[0], v[1]}});
      multiply(T{}, o[2 * i + 1], p, TileB{{v[2], v[3]}});
    }
  }

  __device__ __forceinline__ void walk() {
    const int64_t stride = kWarps * kTileKeys, first = task.begin + warp * kTileKeys;
    const int64_t clear_to = int64_t(task.length) - a.positions + 1, clear_from = a.window ? task.length - a.window : 0;
    Ahead ahead;
    look(ahead, first);
    for (int slot = 0; slot < a.slots - 1; ++slot) {
      fill(slot, ahead), commit_copies();
      look(ahead, first + (slot + 1) * stride);
    }
    int slot = 0, free = a.slots - 1;
    for (int64_t base = first; base < task.end; base += stride) {
      await_copies_but(a.slots - 2);
      __syncwarp();  // all lanes' copies have arrived, and all are done with the slot that is filled now
      fill(free, ahead), commit_copies();
      look(ahead, base + a.slots * stride);
      if (base >= clear_from && base + kTileKeys <= clear_to && base + kTileKeys <= task.end) work<false>(slot, int(base));
      else work<true>(slot, int(base));
      free = slot, slot = slot + 1 < a.slots ? slot + 1 : 0;
    }
    await_copies<0>();
  }

  // Joins the lanes' sums, in shared memory for `finish`.
  __device__ __forceinline__ void lay_out() {
    float* all = reinterpret_cast<float*>(shared_memory());
    __syncthreads();  // all warps are done with their rings
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = lanes_sum<4>(sum[half]);
      float* row = all + (warp * kTileRows + g + 8 * half) * (Wide + 2);
#pragma unroll
      for (int i = 0; i < Wide / 8; ++i) {
        row[8 * i + 2 * t] = o[i].v[2 * half], row[8 * i + 2 * t + 1] = o[i].v[2 * half + 1];
      }
      if (t == 0) row[Wide] = top[half], row[Wide + 1] = total;
    }
    __syncthreads();
  }
};

template <class T, int Wide, class Source, bool Aligned>
__global__ void __launch_bounds__(kThreads, Aligned ? 2 : 1)
    attend_tiles(Queries<T> queries, Source source, Scratch scratch) {
  release_dependents();
  wait_for_producers();
  const Task task = task_of<kTileRows>(queries, own_seat());
  if (int(blockIdx.x) >= task.active) return;  // a shorter sequence than the longest
  AttendTiles<T, Wide, Source, Aligned> a(queries, source, task);
  a.take_queries();
  a.walk();
  a.lay_out();
  finish<kTileRows, Wide>(queries, task, scratch, own_seat());
}

// --- host -----------------------------------------------------------------------------------------------------------

template <class T, class Source>
void run_tiles(const Queries<T>& a, const Source& source, int64_t batch, bool is_aligned, const Settings& knobs,
               const Stream& stream) {
  auto with = [&](auto wide) {
    constexpr int kWide = decltype(wide)::value;
    by_flag(is_aligned, [&](auto alignment) {
      constexpr bool kAligned = decltype(alignment)::value;
      using A = AttendTiles<T, kWide, Source, kAligned>;
      start(attend_tiles<T, kWide, Source, kAligned>, a, source, batch, kTileRows, kWide, kWarps * A::kSlotBytes,
            size_t(a.width) * sizeof(T), knobs, stream);
    });
  };
  if (a.width <= 64) return with(std::integral_constant<int, 64>{});
  if (a.width <= 96) return with(std::integral_constant<int, 96>{});
  if (a.width <= 128) return with(std::integral_constant<int, 128>{});
  AUTOSEL_CHECK(a.width <= 256, "attention: heads of " << a.width << " channels are too wide for this kernel");
  with(std::integral_constant<int, 256>{});
}

// Calls body(T{}) for the two types that tensor cores multiply exactly.
template <class Body> void by_half_dtype(const TensorView& t, const Body& body) {
#if defined(AUTOSEL_BF16) || !defined(AUTOSEL_ONE_DTYPE)
  if (is(t, kDLBfloat, 16)) return body(bf16{});
#endif
#if defined(AUTOSEL_FP16) || !defined(AUTOSEL_ONE_DTYPE)
  if (is(t, kDLFloat, 16)) return body(f16{});
#endif
  AUTOSEL_THROW(TypeError) << "dtype must be bfloat16 or float16, and the build's";
}

}  // namespace attention
}  // namespace autosel
