// paged_attn   paged_attn_decode.cu's op on tensor cores: bf16 and fp16, heads up to 256
//              q[B,Hq,S,D], k/v_pages[P,page,Hkv,D], block_table[B,n] int32, lengths[B] int32 -> o[B,Hq,S,D]
//
// bytes, FLOPs, roofline, knobs, design: attn_decode_mma.cu's, plus 4 bytes of table a page; each lane finds the key of
// each piece it copies, from L1 after the first.
// status  compiled and emulated; not yet run on silicon
#include "attention_mma.cuh"

namespace autosel {
namespace {

void paged_attn_decode_mma(TensorView q, TensorView k, TensorView v, TensorView table, TensorView lengths, int64_t max_len,
                           double scale, int64_t window, double softcap, TensorView o, int64_t tile, int64_t stages,
                           int64_t chunk, int64_t pdl) {
  using namespace attention;
  check_form(q, "q", q, 4), check_form(k, "k_pages", q, 4), check_form(v, "v_pages", q, 4);
  check_form(table, "block_table", q, 2);
  for (int i = 0; i < 4; ++i) AUTOSEL_CHECK(k.size(i) == v.size(i), "paged_attn: k_pages and v_pages differ in size");
  AUTOSEL_CHECK(k.size(0) > 0 && k.size(1) > 0 && k.size(3) == q.size(3), "paged_attn: no pages, or of another width");
  AUTOSEL_CHECK(same_dtype(q, k) && same_dtype(q, v), "paged_attn: dtypes differ");
  AUTOSEL_CHECK(is(table, kDLInt, 32) && table.size(0) == q.size(0), "paged_attn: block_table must be int32 [B,n]");
  AUTOSEL_CHECK(max_len >= 0 && max_len <= table.size(1) * k.size(1), "paged_attn: max_len exceeds the block table");
  by_half_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    auto queries = queries_of<T, T>(q, o, Optional<TensorView>(lengths), k.size(2), max_len, scale, window, softcap, chunk);
    Paged<T> source{data<T>(k), data<T>(v), {k.stride(0), k.stride(2), k.stride(1)},
                    {v.stride(0), v.stride(2), v.stride(1)}, data<int32_t>(table), table.stride(0), int(k.size(0)),
                    unsigned(k.size(1))};
    queries.aligned_kv = aligned<T>(source.k, source.ks, q.size(3)) && aligned<T>(source.v, source.vs, q.size(3));
    run_tiles<T>(queries, source, q.size(0), Settings{tile, stages, chunk, pdl}, Stream(q));
  });
}

}  // namespace
}  // namespace autosel

TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_attn_decode_mma, autosel::paged_attn_decode_mma);
