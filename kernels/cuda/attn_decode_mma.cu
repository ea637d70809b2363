// attn   attn_decode.cu's op on tensor cores: bf16 and fp16, heads up to 256
//        o = softmax(scale q K^T, causal by cache offset) V   q[B,Hq,S,D], k/v[B,Hkv,Lmax,D], lengths[B] -> o[B,Hq,S,D]
//
// bytes   2 B Hkv L D b + 2 B Hq S D b (b = bytes an element)      FLOPs   4 B Hq S L D
// roofline at B=1, 64/8 heads, D=128, L=8192, bf16 on an H200: 33.6 MB at 4.3 TB/s are 7.8 us; a node, two latencies and
// the join of the splits are about 4 more.
// knobs   as attn_decode.cu; knob `matrix` says that CUDA cores could not keep up (g * beta / (b S f) > 64 lanes: from
//         7 rows per KV head on an H200, from 27 on an RTX 5070 Ti).
// design  attention_mma.cuh: 16 packed rows per tile, the same work for 1 row or 16. Per 16 keys of D = 128 (8 KB of
//         cache) a warp issues 32 products and 16 ldmatrix; with 8 rows half of each product is wasted, which costs
//         nothing.
// idea    packed GQA on m16n8k16: FlashInfer's decode with tensor cores; layouts: the PTX ISA's.
// status  compiled and emulated; not yet run on silicon
#include "attention_mma.cuh"

namespace autosel {
namespace {

void attn_decode_mma(TensorView q, TensorView k, TensorView v, Optional<TensorView> lengths, int64_t max_len,
                     double scale, int64_t window, double softcap, TensorView o, int64_t tile, int64_t stages,
                     int64_t chunk, int64_t pdl) {
  using namespace attention;
  AUTOSEL_CHECK(same_dtype(q, k), "attention: dtypes differ");
  by_half_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    auto source = contiguous<T>(q, k, v, max_len);
    auto queries = queries_of<T>(q, o, lengths, k.size(1), max_len, scale, window, softcap, chunk);
    run_tiles<T>(queries, source, q.size(0), aligned(source, q.size(3)), {tile, stages, chunk, pdl}, Stream(q));
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(attn_decode_mma, autosel::attn_decode_mma);
