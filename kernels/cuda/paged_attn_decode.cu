// paged_attn   attn over pages: key t of sequence b is row t % page of page block_table[b, t / page]
//              q[B,Hq,S,D], k/v_pages[P,page,Hkv,D], block_table[B,n] int32, lengths[B] int32 -> o[B,Hq,S,D]
//
// bytes, FLOPs, roofline, knobs: as attn_decode.cu, plus 4 bytes of table per page.
// design  attention.cuh. Keys are located one block before they are copied, so that the work on a block hides the
//         table's latency. Pages may have any size, because each key is located separately: 4 lookups per lane and
//         block, from L1 after the first. A page that does not exist counts as zeros: checking on the host first would
//         stall the stream.
// status  compiled and emulated; not yet run on silicon
#include "attention.cuh"

namespace autosel {
namespace {

void paged_attn_decode(TensorView q, TensorView k, TensorView v, TensorView table, TensorView lengths, int64_t max_len,
                       double scale, int64_t window, double softcap, TensorView o, int64_t tile, int64_t stages,
                       int64_t chunk, int64_t pdl) {
  using namespace attention;
  AUTOSEL_CHECK(same_dtype(q, k), "attention: dtypes differ");
  by_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    auto source = paged<T>(q, k, v, table, max_len);
    Optional<TensorView> given(lengths);
    auto queries = queries_of<T>(q, o, given, k.size(2), max_len, scale, window, softcap, chunk);
    run<T, T>(queries, source, q.size(0), aligned(source, q.size(3)), {tile, stages, chunk, pdl}, Stream(q));
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(paged_attn_decode, autosel::paged_attn_decode);
