// paged_attn   paged_attn_decode.cu's op on tensor cores: bf16 and fp16, heads up to 256
//              q[B,Hq,S,D], k/v_pages[P,page,Hkv,D], block_table[B,n] int32, lengths[B] int32 -> o[B,Hq,S,D]
//
// bytes, FLOPs, roofline, knobs, design: as attn_decode_mma.cu, plus 4 bytes of table per page. Each lane locates one
// of a block's 16 keys, from L1 after the first, and passes it to the lanes that copy it by two shuffles.
// tried   each lane locating every key it copies: at 256 channels 32 registers, of which 16 to 40 bytes were spilled.
// status  compiled and emulated; not yet run on silicon
#include "attention_mma.cuh"

namespace autosel {
namespace {

void paged_attn_decode_mma(TensorView q, TensorView k, TensorView v, TensorView table, TensorView lengths, int64_t max_len,
                           double scale, int64_t window, double softcap, TensorView o, int64_t tile, int64_t stages,
                           int64_t chunk, int64_t pdl) {
  using namespace attention;
  AUTOSEL_CHECK(same_dtype(q, k), "attention: dtypes differ");
  by_half_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    auto source = paged<T>(q, k, v, table, max_len);
    Optional<TensorView> given(lengths);
    auto queries = queries_of<T>(q, o, given, k.size(2), max_len, scale, window, softcap, chunk);
    run_tiles<T>(queries, source, q.size(0), aligned(source, q.size(3)), {tile, stages, chunk, pdl}, Stream(q));
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(paged_attn_decode_mma, autosel::paged_attn_decode_mma);
