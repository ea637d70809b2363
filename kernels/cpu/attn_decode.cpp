// attn   o = softmax(scale q K^T, causal by cache offset) V   q[B,Hq,S,D], k/v[B,Hkv,Lmax,D], lengths[B] -> o[B,Hq,S,D]
//
// bytes   2 B Hkv L D b + 2 B Hq S D b (b = bytes an element)      FLOPs   4 B Hq S L D
// roofline at B=1, 32/8 heads, D=128, L=8192, bf16: 33.6 MB; at 36 GB/s (Zen 4, 2 cores) 930 us. Arithmetic of it is
// 44 cycles a key and KV head, 390 us on these two cores: bandwidth decides, if loads and arithmetic overlap.
// knobs (knobs/cpu/attention.py)
//   threads   as many as the memory's rate and the arithmetic need
//   tile      keys at a time: a tile of K and V fills L1
//   chunk     fewest keys in a thread's share: for fewer, waking the thread costs more than it saves
//   prefetch  keys between the second prefetch of a row and its use (the loaded latency in keys); 0 = no prefetch
//             (by tiles: 0, or the next tile's rows while one is in use)
// design  attention.h: packed queries, tiles, masks as intervals, equal shares of the work.
//
// Measured on Zen 4 (2 cores, shared machine) with the shape above; figures are fractions of a read probe interleaved
// with the calls:
//   no prefetch, tile 16 / 32 / 64 / 128                               0.70 / 0.52 / 0.51 / 0.55
//     while one stream is in use, the hardware prefetcher loses the other; small tiles keep both alive
//   prefetch one tile ahead into L1 (t0)                               0.34: fills of L1 wait in its 24 miss buffers
//   prefetch one tile ahead into L2 (t1), tile 64                      0.80
//     every second or fourth line only                                 0.57: this core prefetches no neighbouring line
//   prefetch V per channel while working, not all at once              0.83
//   probabilities rounded to bf16, V by dots of two tokens             0.87   (P V: 20 cycles per key instead of 33)
//   a second prefetch 16 keys ahead                                    0.91   (one core alone: 0.75 -> 0.80)
//     a prefetch into L2 is dropped if the memory queue is full (174 GB/s of them issue, 29 GB/s arrive)
//   softmax of four rows together, V's first rows prefetched meanwhile 0.93   (one core alone: 0.83)
//     at the machine's quietest, probe at 57 GB/s: 0.75; the rest is arithmetic that waits for lines dropped twice
//   scores with one row per 128-bit lane (four partial sums per token, not sixteen): 25 cycles per key instead of 21,
//     because the broadcasting load shares a pipe with the dots; rejected
//   cycles per key and KV head with all prefetches, operands in L2, G=4 (one core alone; a temporary loop around attend()
//   on one head: no benchmark prints these): D=64 36.5, D=128 57
//     softmax by powers of two, degree 4 for weights of 8 bits, their sum by a dot with ones   34.5, 56
//     prefetches of a known length, one test for the rows of a step                            28.3, 50
//     scores with two keys' halves per vector (16 keys per step, one level less to add)        no faster; rejected
//     sums by blends and one shuffle per join instead of two shuffles                          slower
//   fp32 P V by widening: kept for fp16, fp32 and cores without the dot; P split into two bf16 parts costs as much
// Emerald Rapids (AMX; two cores read 25 to 30 GB/s): tiles (attention_amx.h) against the dots before, with the knobs
// of each, in turn, operands in memory, three runs, and the share of the read probe:
//   32/8 heads, D=64, batch 4, L=2048   1.24-1.36 times as fast, 62-76 %    one core, L=8192   1.32-1.40, 72-78 %
//   64/8 heads, D=128, L=8192           1.67-1.90, 62-68 %                  32/8 heads, D=128  1.08-1.37, 52-71 %
//   ns a key and KV head from L2 on one core, without prefetches: D=64, G=1 13.5 -> 8.5, G=4 18 -> 9, G=8 36 -> 12;
//   D=128, G=4 32 -> 16, G=8 63 -> 24
// Orders of its prefetches, shares of the probe at 32/8, D=64, batch 4, in two runs of their own:
//   the next tile's keys, then its values 51 %; in turn 66 %; two parts of each in turn 68 %
//   two parts 52 %, four as now 57 %, eight 55 %; all of them during the scores, from four parts, 50 %
//   as for the dots (keys during scores, values during P V) 43 %, without a second prefetch 44 %, every second line 39 %
#include "attention.h"

namespace autosel {
namespace {

void attn_decode(TensorView q, TensorView k, TensorView v, Optional<TensorView> lengths, int64_t max_len, double scale,
                 int64_t window, double softcap, TensorView o, int64_t threads, int64_t tile, int64_t chunk,
                 int64_t prefetch) {
  AUTOSEL_CHECK(k.ndim() == 4 && v.ndim() == 4, "attn takes k[B,Hkv,Lmax,D] and v[B,Hkv,Lmax,D]");
  attention::check_queries(q, o, lengths, k.size(1), k.size(3));
  for (int i = 0; i < 4; ++i) AUTOSEL_CHECK(k.size(i) == v.size(i), "attn: k and v differ in size");
  AUTOSEL_CHECK(k.size(0) == q.size(0), "attn: batches of q and k differ");
  AUTOSEL_CHECK(k.stride(3) == 1 && v.stride(3) == 1, "attn: last dimension not contiguous");
  AUTOSEL_CHECK(same_dtype(q, k) && same_dtype(q, v), "attn: dtypes differ");
  AUTOSEL_CHECK(max_len >= 0 && max_len <= k.size(2), "attn: max_len exceeds the cache");
  by_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    using namespace attention;
    typename Contiguous<T>::Tile tiles[256][2];
    Contiguous<T> source{strided4<const T>(k), strided4<const T>(v), tiles};
    attend<T>(shape_of(q, k.size(1), scale, window, softcap, tile), strided4<const T>(q), strided4<T>(o),
              Lengths(lengths, max_len, k.size(2)), threads, chunk, prefetch, source);
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(attn_decode, autosel::attn_decode);
