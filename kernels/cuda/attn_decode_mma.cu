// attn   attn_decode.cu's op on tensor cores: bf16 and fp16, heads up to 256
//        o = softmax(scale q K^T, causal by cache offset) V   q[B,Hq,S,D], k/v[B,Hkv,Lmax,D], lengths[B] -> o[B,Hq,S,D]
//
// bytes   2 B Hkv L D b + 2 B Hq S D b (b = bytes an element)      FLOPs   4 B Hq S L D
// roofline at B=1, 64/8 heads, D=128, L=8192, bf16 on an H200: 33.6 MB at 4.3 TB/s are 7.8 us; a node, two latencies and
// the join of the splits are about 4 more.
// knobs   attn_decode.cu's; knob `matrix` says that CUDA cores could not keep up (g * beta / (b S f) > 64 lanes: from 7
//         rows a KV head on an H200, from 27 on an RTX 5070 Ti).
// design  attention_mma.cuh: 16 packed rows a tile. With 8 rows half of each product is wasted, which costs nothing: per
//         16 keys a warp issues 32 products and 24 ldmatrix at D = 128 for 8 KB of cache, and 1 or 16 rows are the same.
// idea    packed GQA on m16n8k16: FlashInfer's decode with tensor cores; layouts: the PTX ISA's.
// status  compiled and emulated; not yet run on silicon
#include "attention_mma.cuh"

namespace autosel {
namespace {

void attn_decode_mma(TensorView q, TensorView k, TensorView v, Optional<TensorView> lengths, int64_t max_len, double scale,
                     int64_t window, double softcap, TensorView o, int64_t tile, int64_t stages, int64_t chunk, int64_t pdl) {
  using namespace attention;
  check_form(q, "q", q, 4), check_form(k, "k", q, 4), check_form(v, "v", q, 4);
  for (int i = 0; i < 4; ++i) AUTOSEL_CHECK(k.size(i) == v.size(i), "attn: k and v differ in size");
  AUTOSEL_CHECK(k.size(0) == q.size(0) && k.size(3) == q.size(3), "attn: q and k differ in batch or width");
  AUTOSEL_CHECK(same_dtype(q, k) && same_dtype(q, v), "attn: dtypes differ");
  AUTOSEL_CHECK(max_len >= 0 && max_len <= k.size(2), "attn: max_len exceeds the cache");
  by_half_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    auto queries = queries_of<T, T>(q, o, lengths, k.size(1), max_len, scale, window, softcap, chunk);
    Contiguous<T> source{data<T>(k), data<T>(v), {k.stride(0), k.stride(1), k.stride(2)},
                         {v.stride(0), v.stride(1), v.stride(2)}};
    queries.aligned_kv = aligned<T>(source.k, source.ks, q.size(3)) && aligned<T>(source.v, source.vs, q.size(3));
    run_tiles<T>(queries, source, q.size(0), Settings{tile, stages, chunk, pdl}, Stream(q));
  });
}

}  // namespace
}  // namespace autosel

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attn_decode_mma, autosel::attn_decode_mma);
