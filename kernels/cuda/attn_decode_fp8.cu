// attn_fp8   attn over a cache in fp8 e4m3, one scale a KV head for K and one for V: K = k * k_scale[h], V = v * v_scale[h]
//            q[B,Hq,S,D], k/v[B,Hkv,Lmax,D] e4m3, k_scale/v_scale[Hkv] fp32, lengths[B] -> o[B,Hq,S,D] in q's dtype
//
// bytes   2 B Hkv L D + 2 B Hq S D b      FLOPs   4 B Hq S L D
// roofline at B=1, 32/8 heads, D=128, L=8192 on an H200: 16.8 MB at 4.3 TB/s are 3.9 us; a node, two latencies and the
// join of the splits are about 4 more.
// knobs   attn_decode.cu's (knobs/gpu/attention.py, with b = 1).
// design  attention.cuh with pieces of 16 channels, so that a lane holds accumulators for 4 rows; more rows read the
//         cache again, from L2. The loop does not use the scales: that of K multiplies the query, that of V the result.
// status  compiled and emulated; not yet run on silicon
#include "attention.cuh"

namespace autosel {
namespace {

void attn_decode_fp8(TensorView q, TensorView k, TensorView v, TensorView k_scale, TensorView v_scale,
                     Optional<TensorView> lengths, int64_t max_len, double scale, int64_t window, double softcap,
                     TensorView o, int64_t tile, int64_t stages, int64_t chunk, int64_t pdl) {
  using namespace attention;
  AUTOSEL_CHECK(is_e4m3(k) && is_e4m3(v), "attention: k and v must be e4m3");
  for (const TensorView* t : {&k_scale, &v_scale}) {
    check_form(*t, "k_scale and v_scale", q, 1);
    AUTOSEL_CHECK(is(*t, kDLFloat, 32) && t->size(0) == k.size(1), "attention: scales must be fp32[Hkv]");
  }
  by_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    auto source = contiguous<e4m3>(q, k, v, max_len);
    auto queries = queries_of<T>(q, o, lengths, k.size(1), max_len, scale, window, softcap, chunk);
    queries.k_scale = data<float>(k_scale), queries.v_scale = data<float>(v_scale);
    run<T, e4m3>(queries, source, q.size(0), aligned(source, q.size(3)), {tile, stages, chunk, pdl}, Stream(q));
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(attn_decode_fp8, autosel::attn_decode_fp8);
