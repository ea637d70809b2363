// attn   o = softmax(scale q K^T, causal by cache offset) V   q[B,Hq,S,D], k/v[B,Hkv,Lmax,D], lengths[B] -> o[B,Hq,S,D]
//
// bytes   2 B Hkv L D b + 2 B Hq S D b (b = bytes an element)      FLOPs   4 B Hq S L D
// roofline at B=1, 32/8 heads, D=128, L=8192, bf16 on an H200: 33.6 MB at 4.3 TB/s are 7.8 us; a node, two latencies and
// the join of the splits are about 4 more.
// knobs (knobs/gpu/attention.py)
//   tile     tokens of a CTA in a stage: one is its share of the bytes in flight
//   stages   tile * stages tokens are the ring; all of it but one block per warp is in flight
//   chunk    keys that a CTA serves. L / split, split the smallest whose predicted time is within 3 % of the least; for
//            ragged batches the sum of lengths over c S CTAs. A sequence takes as many CTAs as it has chunks; others exit.
//            If its rows take several tiles, a CTA serves that many chunks.
//   pdl      launched as a programmatic dependent
// design  attention.cuh: packed queries, a ring per lane, masks at the edges only, joined by the last CTA. Instructions
//         that a lane issues per element of the cache (ptxas, sm_90a, bf16): about 4 at one row, 8 at four; an H200 has
//         13.8 in the time an element takes to arrive, an RTX 5070 Ti 53. More rows: attn_decode_mma.cu.
// tried   (ptxas, sm_90a) addresses of K and V by multiplication for every key, exp2f with its scaling for subnormals:
//         12 at four rows. First and last key of each of eight rows in registers: spills 36 bytes.
// idea    split-KV: Dao's Flash-Decoding; the last CTA joins: FlashInfer's xqa; halving exchanges: the reduce-scatter.
// status  compiled and emulated; not yet run on silicon
#include "attention.cuh"

namespace autosel {
namespace {

void attn_decode(TensorView q, TensorView k, TensorView v, Optional<TensorView> lengths, int64_t max_len, double scale,
                 int64_t window, double softcap, TensorView o, int64_t tile, int64_t stages, int64_t chunk,
                 int64_t pdl) {
  using namespace attention;
  AUTOSEL_CHECK(same_dtype(q, k), "attention: dtypes differ");
  by_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    auto source = contiguous<T>(q, k, v, max_len);
    auto queries = queries_of<T>(q, o, lengths, k.size(1), max_len, scale, window, softcap, chunk);
    run<T, T>(queries, source, q.size(0), aligned(source, q.size(3)), {tile, stages, chunk, pdl}, Stream(q));
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(attn_decode, autosel::attn_decode);
