// paged_attn   attn over pages: key t of sequence b is row t % page of page block_table[b, t / page]
//              q[B,Hq,S,D], k/v_pages[P,page,Hkv,D], block_table[B,n] int32, lengths[B] int32 -> o[B,Hq,S,D]
//
// bytes, FLOPs, roofline, knobs: as in attn_decode.cpp, plus 4 bytes of table per page.
// A tile is a list of row addresses, built one tile ahead, so a tile may span pages of any size, and the prefetches of
// attention.h reach into pages that are not adjacent. Rows of one head are Hkv*D apart, which hardware prefetchers do
// not follow; without a software prefetch they miss. The list costs nothing: one address per row against 50 cycles of
// work.
#include "attention.h"

namespace autosel {
namespace {

template <class T> struct Paged {
  attention::Strided4<const T> keys, values;  // strides of page, slot, head
  const int32_t* table;
  int64_t table_row, table_column, pages, page, tile;
  const T** rows;  // [rank][slot][k, v][tile]
  std::atomic<bool>* stray;

  const T** list(int rank, int slot, int which) const { return rows + ((rank * 2 + slot) * 2 + which) * tile; }
  void fill(int rank, int slot, int64_t b, int64_t h, int64_t first, int64_t n) const {
    const T **k = list(rank, slot, 0), **v = list(rank, slot, 1);
    for (int64_t i = 0; i < n;) {
      int64_t at = (first + i) % page, id = table[b * table_row + (first + i) / page * table_column];
      if (id < 0 || id >= pages) stray->store(true, std::memory_order_relaxed), id = 0;
      for (; at < page && i < n; ++at, ++i) k[i] = keys.at(id, at, h), v[i] = values.at(id, at, h);
    }
  }
  attention::Listed<T> k(int rank, int slot) const { return {list(rank, slot, 0)}; }
  attention::Listed<T> v(int rank, int slot) const { return {list(rank, slot, 1)}; }
};

void paged_attn_decode(TensorView q, TensorView k, TensorView v, TensorView table, TensorView lengths, int64_t max_len,
                       double scale, int64_t window, double softcap, TensorView o, int64_t threads, int64_t tile,
                       int64_t chunk, int64_t prefetch) {
  AUTOSEL_CHECK(k.ndim() == 4 && v.ndim() == 4, "paged_attn takes k_pages[P,page,Hkv,D] and v_pages[P,page,Hkv,D]");
  Optional<TensorView> given(lengths);
  attention::check_queries(q, o, given, k.size(2), k.size(3));
  for (int i = 0; i < 4; ++i) AUTOSEL_CHECK(k.size(i) == v.size(i), "paged_attn: k_pages and v_pages differ in size");
  AUTOSEL_CHECK(k.size(0) > 0 && k.size(1) > 0, "paged_attn: no pages");
  AUTOSEL_CHECK(k.stride(3) == 1 && v.stride(3) == 1, "paged_attn: last dimension not contiguous");
  AUTOSEL_CHECK(same_dtype(q, k) && same_dtype(q, v), "paged_attn: dtypes differ");
  AUTOSEL_CHECK(table.ndim() == 2 && table.size(0) == q.size(0) && attention::is_int32(table),
                "paged_attn: block_table must be int32 [B,n]");
  if (threads > 255) threads = 255;
  std::atomic<bool> stray{false};
  by_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    using namespace attention;
    static thread_local Scratch scratch;
    Shape a = shape_of(q, k.size(2), scale, window, softcap, tile);
    const T** rows = scratch.get<const T*>(threads * 4 * a.tile);
    Paged<T> source{strided4<const T>(k), strided4<const T>(v), data<int32_t>(table), table.stride(0), table.stride(1),
                    k.size(0), k.size(1), a.tile, rows, &stray};
    attend<T>(a, strided4<const T>(q), strided4<T>(o), Lengths(given, max_len, table.size(1) * k.size(1)), threads,
              chunk, prefetch, source);
  });
  AUTOSEL_CHECK(!stray.load(), "paged_attn: block_table names a page that does not exist");
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(paged_attn_decode, autosel::paged_attn_decode);
