// kv_append   writes S new rows of K and V per sequence and KV head into a cache, from slot positions[b] on
//             k/v[B,Hkv,S,D] -> k/v_cache[B,Hkv,Lmax,D], or pages [P,page,Hkv,D] through block_table[B,n] int32
//
// bytes   4 B Hkv S D b (b = bytes an element): two reads, two writes      FLOPs   0
// roofline at B=1, Hkv=8, S=1, D=128, bf16: 8 KB, all in L2: the cost is the call itself.
// knobs   threads (knobs/cpu/attention.py: append): one, unless the copy takes longer than two fork-joins (a prompt of
//         hundreds).
// Every slot is checked before the first is written: a refused call leaves the cache unchanged.

#include "tensor.h"

namespace autosel {
namespace {

struct Copy {
  const char* from;
  char* to;
  int64_t b, h, s, batch, page, head;  // strides in bytes: from [b, h, s]; to [batch row or page, slot, head]
};

Copy copy_of(const TensorView& from, const TensorView& to, bool paged, int64_t size) {
  int slot = paged ? 1 : 2, head = paged ? 2 : 1;
  return {data<char>(from), data<char>(to), from.stride(0) * size, from.stride(1) * size, from.stride(2) * size,
          to.stride(0) * size, to.stride(slot) * size, to.stride(head) * size};
}

bool is_int32(const TensorView& t) { return t.dtype().code == kDLInt && t.dtype().bits == 32; }

void kv_append(TensorView k, TensorView v, TensorView positions, Optional<TensorView> block_table, TensorView k_cache,
               TensorView v_cache, int64_t threads) {
  AUTOSEL_CHECK(k.ndim() == 4 && v.ndim() == 4, "kv_append takes k[B,Hkv,S,D] and v[B,Hkv,S,D]");
  AUTOSEL_CHECK(k_cache.ndim() == 4 && v_cache.ndim() == 4, "kv_append: caches must have 4 dimensions");
  for (int i = 0; i < 4; ++i)
    AUTOSEL_CHECK(k.size(i) == v.size(i) && k_cache.size(i) == v_cache.size(i), "kv_append: sizes of k and v differ");
  bool paged = block_table.has_value();
  int64_t batch = k.size(0), heads = k.size(1), count = k.size(2), d = k.size(3);
  AUTOSEL_CHECK(k_cache.size(paged ? 2 : 1) == heads && k_cache.size(3) == d, "kv_append: heads or widths differ");
  AUTOSEL_CHECK(k.stride(3) == 1 && v.stride(3) == 1 && k_cache.stride(3) == 1 && v_cache.stride(3) == 1,
                "kv_append: last dimension not contiguous");
  AUTOSEL_CHECK(same_dtype(k, v) && same_dtype(k, k_cache) && same_dtype(k, v_cache), "kv_append: dtypes differ");
  AUTOSEL_CHECK(positions.ndim() == 1 && positions.size(0) == batch && is_int32(positions),
                "kv_append: positions must be int32 [B]");

  const int32_t *first = data<int32_t>(positions), *table = nullptr;
  int64_t step = positions.stride(0), row = 0, column = 0, room = k_cache.size(paged ? 1 : 2);
  int64_t page = paged ? room : 0;
  if (paged) {
    const TensorView& t = block_table.value();
    AUTOSEL_CHECK(t.ndim() == 2 && t.size(0) == batch && is_int32(t), "kv_append: block_table must be int32 [B,n]");
    table = data<int32_t>(t), row = t.stride(0), column = t.stride(1), room = t.size(1) * page;
  } else {
    AUTOSEL_CHECK(k_cache.size(0) == batch, "kv_append: batches of k and the cache differ");
  }
  for (int64_t b = 0; b < batch && count > 0; ++b) {
    int64_t at = first[b * step];
    AUTOSEL_CHECK(at >= 0 && at + count <= room, "kv_append: position " << at << " + " << count << " of row " << b
                                                                        << " is outside the cache of " << room);
    if (paged)
      for (int64_t i = at / page; i <= (at + count - 1) / page; ++i) {
        int64_t id = table[b * row + i * column];
        AUTOSEL_CHECK(id >= 0 && id < k_cache.size(0),
                      "kv_append: block_table names page " << id << " of " << k_cache.size(0));
      }
  }

  int64_t size = k.dtype().bits / 8, bytes = d * size;
  Copy copies[2] = {copy_of(k, k_cache, paged, size), copy_of(v, v_cache, paged, size)};
  parallel(threads, batch * count, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t b = i / count, s = i % count, slot = first[b * step] + s, outer = b;
      if (paged) outer = table[b * row + slot / page * column], slot %= page;
      for (const Copy& c : copies)
        for (int64_t h = 0; h < heads; ++h)
          memcpy(c.to + outer * c.batch + slot * c.page + h * c.head, c.from + b * c.b + h * c.h + s * c.s,
                 size_t(bytes));
    }
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(kv_append, autosel::kv_append);
