// kv_append   write new keys and values into the cache, bit for bit; nothing else of it changes
//             k/v[B,Hkv,S,D], positions[B] int32 -> k/v_cache[B,Hkv,Lmax,D], or by block_table[B,n] int32 into pages
//             [P,page,Hkv,D]; everything strided, last dimension contiguous. Token s of row b goes to positions[b] + s.
//
// bytes   4 B Hkv S D b + 4 B      FLOPs   0
// roofline at B=1, 8 heads of 128, bf16 on an H200: 8 KB at 4.3 TB/s are 2 ns; a node and two latencies are 2.8 us.
// knobs   a warp per token and head, 8 warps, grid = ceil(B S Hkv / 8) (knobs/gpu/rows.py); pdl: a programmatic
//         dependent.
// design  Positions and the table are on the device, and reading them on the host would stall the stream: a token whose
//         position is outside the cache, or whose page does not exist, is not written. Raw bytes are copied, 16 if
//         aligned, otherwise elements: NaN payloads and subnormals are kept.
// status  compiled and emulated; not yet run on silicon
#include "launch.cuh"

namespace autosel {
namespace {

constexpr unsigned kThreads = 256;

struct Strides { int64_t batch, head, token; };  // in elements; of a paged cache: page, head, slot

template <class U> struct Append {
  const U* from[2];
  Strides read[2];
  U* to[2];
  Strides write[2];
  const int32_t *positions, *table;  // no table: a contiguous cache
  int64_t position_step, table_row;
  int64_t batch, heads, tokens, room;  // room: positions per row
  int64_t page, pages;
  int width;
};

template <class U, bool Aligned> __global__ void __launch_bounds__(kThreads) append(Append<U> a) {
  release_dependents();
  wait_for_producers();
  const int lane = int(threadIdx.x) % kWarp, warps = int(blockDim.x) / kWarp;
  constexpr int V = Aligned ? kVec<U> : 1;
  const int64_t count = a.batch * a.heads * a.tokens;
  for (int64_t i = int64_t(blockIdx.x) * warps + threadIdx.x / kWarp; i < count; i += int64_t(gridDim.x) * warps) {
    const int64_t s = i % a.tokens, h = i / a.tokens % a.heads, b = i / a.tokens / a.heads;
    const int64_t position = int64_t(a.positions[b * a.position_step]) + s;
    if (position < 0 || position >= a.room) continue;
    int64_t row = b, slot = position;
    if (a.table) {
      row = a.table[b * a.table_row + position / a.page], slot = position % a.page;
      if (row < 0 || row >= a.pages) continue;
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const Strides r = a.read[which], w = a.write[which];
      const U* from = a.from[which] + b * r.batch + h * r.head + s * r.token;
      U* to = a.to[which] + row * w.batch + h * w.head + slot * w.token;
      for (int e = lane * V; e < a.width; e += kWarp * V) {
        if (Aligned) store(to + e, load_resident(from + e));
        else to[e] = from[e];
      }
    }
  }
}

template <class U> Strides strides(const TensorView& t, int batch, int head, int token) {
  return {t.stride(batch), t.stride(head), t.stride(token)};
}

template <class U> bool aligned(const U* p, const Strides& s) {
  const int64_t bytes = sizeof(U);
  return uintptr_t(p) % 16 == 0 && s.batch * bytes % 16 == 0 && s.head * bytes % 16 == 0 && s.token * bytes % 16 == 0;
}

void kv_append(TensorView k, TensorView v, TensorView positions, Optional<TensorView> block_table, TensorView k_cache,
               TensorView v_cache, int64_t grid, int64_t pdl) {
  AUTOSEL_CHECK(grid >= 1 && grid <= kMostElements, "grid is " << grid);
  const bool paged = block_table.has_value();
  const TensorView *news[2] = {&k, &v}, *caches[2] = {&k_cache, &v_cache};
  const char *names[2] = {"k", "v"}, *cache_names[2] = {"k_cache", "v_cache"};
  check_form(k, "k", k, 4);
  const int64_t b = k.size(0), hkv = k.size(1), s = k.size(2), d = k.size(3);
  for (int i = 0; i < 2; ++i) {
    const TensorView &now = *news[i], &cache = *caches[i];
    check_form(now, names[i], k, 4), check_form(cache, cache_names[i], k, 4);
    for (int j = 0; j < 4; ++j) AUTOSEL_CHECK(now.size(j) == k.size(j), "kv_append: k and v differ in size");
    for (int j = 0; j < 4; ++j) AUTOSEL_CHECK(cache.size(j) == k_cache.size(j), "kv_append: the caches differ in size");
    AUTOSEL_CHECK(same_dtype(now, k) && same_dtype(cache, k), "kv_append: dtypes differ");
    AUTOSEL_CHECK(cache.size(paged ? 2 : 1) == hkv && cache.size(3) == d, "kv_append: the cache has other heads");
    AUTOSEL_CHECK(paged || cache.size(0) == b, "kv_append: the cache has another batch");
  }
  check_form(positions, "positions", k, 1);
  AUTOSEL_CHECK(is(positions, kDLInt, 32) && positions.size(0) == b, "positions must be int32[" << b << "]");
  if (paged) {
    check_form(*block_table, "block_table", k, 2);
    AUTOSEL_CHECK(is(*block_table, kDLInt, 32) && block_table.value().size(0) == b,
                  "block_table must be int32[" << b << ",n]");
  }
  auto run = [&](auto tag) {
    using U = decltype(tag);
    const int64_t page = paged ? k_cache.size(1) : 1;
    const int head = paged ? 2 : 1, slot = paged ? 1 : 2;
    Append<U> a{{data<U>(k), data<U>(v)},
                {strides<U>(k, 0, 1, 2), strides<U>(v, 0, 1, 2)},
                {data<U>(k_cache), data<U>(v_cache)},
                {strides<U>(k_cache, 0, head, slot), strides<U>(v_cache, 0, head, slot)},
                data<int32_t>(positions), paged ? data<int32_t>(*block_table) : nullptr, positions.stride(0),
                paged ? block_table.value().stride(0) : 0, b, hkv, s,
                paged ? block_table.value().size(1) * page : k_cache.size(2), page, k_cache.size(0), int(d)};
    bool vectorised = d * int64_t(sizeof(U)) % 16 == 0;
    for (int i = 0; i < 2; ++i) vectorised = vectorised && aligned(a.from[i], a.read[i]) && aligned(a.to[i], a.write[i]);
    Stream stream(k);
    Shape shape{dim3(unsigned(grid)), kThreads, 0, pdl != 0};
    by_flag(vectorised, [&](auto is_aligned) { launch(shape, stream, append<U, decltype(is_aligned)::value>, a); });
  };
  const int bits = k.dtype().bits;
  if (bits == 16) run(uint16_t{});
  else if (bits == 32) run(uint32_t{});
  else if (bits == 8) run(uint8_t{});
  else AUTOSEL_THROW(TypeError) << "kv_append copies elements of 8, 16 or 32 bits";
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(kv_append, autosel::kv_append);
