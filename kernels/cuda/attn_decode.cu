// attn   o = softmax(scale q K^T, causal by cache offset) V   q[B,Hq,S,D], k/v[B,Hkv,Lmax,D], lengths[B] -> o[B,Hq,S,D]
//
// bytes   2 B Hkv L D b + 2 B Hq S D b (b = bytes an element)      FLOPs   4 B Hq S L D
// roofline at B=1, 32/8 heads, D=128, L=8192, bf16 on an H200: 33.6 MB at 4.3 TB/s are 7.8 us; a node, two latencies and
// the join of the splits are about 4 more.
// knobs (knobs/gpu/attention.py)
//   tile     tokens a CTA has in a stage: one is its share of the bytes in flight
//   stages   tile * stages tokens are the ring; all of it but a block a warp is under way
//   chunk    keys a CTA serves. L / split, split the smallest whose predicted time is within 3 % of the least; of ragged
//            batches the sum of lengths over c S CTAs. A sequence takes as many CTAs as it has chunks, the rest leave.
//   pdl      launched as a programmatic dependent
// design  attention.cuh: packed queries, a ring of a lane's own, masks at the edges only, joined by the last CTA.
//         Per 16 bytes of K and V a lane spends 16 R multiply-adds (R rows, bf16) and R + 4 exchanges: at R = 4 about 110
//         instructions where an H200 has 221 while the bytes arrive (13.8 a weight), so reading decides; at R = 8 it is
//         even, beyond it tensor cores are due.
// idea    split-KV: Dao's Flash-Decoding; the last CTA joins: FlashInfer's xqa; halving exchanges: the reduce-scatter.
// status  compiled and emulated; not yet run on silicon
#include "attention.cuh"

namespace autosel {
namespace {

void attn_decode(TensorView q, TensorView k, TensorView v, Optional<TensorView> lengths, int64_t max_len, double scale,
                 int64_t window, double softcap, TensorView o, int64_t tile, int64_t stages, int64_t chunk, int64_t pdl) {
  using namespace attention;
  check_form(q, "q", q, 4), check_form(k, "k", q, 4), check_form(v, "v", q, 4);
  for (int i = 0; i < 4; ++i) AUTOSEL_CHECK(k.size(i) == v.size(i), "attn: k and v differ in size");
  AUTOSEL_CHECK(k.size(0) == q.size(0) && k.size(3) == q.size(3), "attn: q and k differ in batch or width");
  AUTOSEL_CHECK(same_dtype(q, k) && same_dtype(q, v), "attn: dtypes differ");
  AUTOSEL_CHECK(max_len >= 0 && max_len <= k.size(2), "attn: max_len exceeds the cache");
  by_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    auto queries = queries_of<T, T>(q, o, lengths, k.size(1), max_len, scale, window, softcap, chunk);
    Contiguous<T> source{data<T>(k), data<T>(v), {k.stride(0), k.stride(1), k.stride(2)},
                         {v.stride(0), v.stride(1), v.stride(2)}};
    queries.aligned_kv = aligned<T>(source.k, source.ks, q.size(3)) && aligned<T>(source.v, source.vs, q.size(3));
    run<T, T>(queries, source, q.size(0), Settings{tile, stages, chunk, pdl}, Stream(q));
  });
}

}  // namespace
}  // namespace autosel

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attn_decode, autosel::attn_decode);
