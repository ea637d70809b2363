// sample   one token a row: repetition penalty, temperature, top_k, top_p, then the token whose interval of cumulative
//          probability (index order) contains `uniform`; temperature 0: the lowest index of the largest penalised logit
//          logits[B,V], history[B,L] int64 (-1 empty), temperature[B], top_k[B] int32, top_p[B], repetition_penalty[B],
//          uniform[B] -> token[B] int64
//
// bytes   B V b + 8 B L      FLOPs   about 6 B V
// roofline at B=1, V=128256, bf16 on an H200: 257 KB from L2 over 12 SMs (rho = 73 GB/s each) are 0.3 us; a node and two
// latencies are 2.8 us.
// knobs   ctas_per_row (knobs/gpu/sampling.py): where reading by c CTAs and joining c partial results cost the same;
//         pdl.
// design  c CTAs read a row once, for the maximum and the mass of every 128 logits. The last of them to finish does the
//         rest, and usually reads only a few of these blocks:
//           top_k   the k-th largest block maximum is at most the k-th largest logit, since k blocks hold one each as
//                   large: only blocks and logits above it are read;
//           top_p   tokens of less than (1 - p) / V of the mass cannot be needed: together they are less than 1 - p.
//         Tokens that pass both, up to 4096, are gathered into shared memory in index order; if more pass, the row is
//         read again instead. Either way the edge is found by radix selection, a byte of the key per pass, by count for
//         top_k and by mass for top_p. Mass is a 64-bit integer, so that sums do not depend on their order: the same
//         inputs give the same token, and ties are resolved by index exactly.
//         Nothing is sorted, and the penalised row is not stored: one bit per token marks the tokens in the history.
// idea    selection without sorting: FlashInfer's sampling; blocks' maxima: kernels/cpu/sample.cpp.
// tried   (ptxas) loops over a list unrolled four times, the compiler's default: a penalty is a division, and four of
//         them in each of seven places spilled 116 bytes on sm_90. Loops that add atomically gain nothing: no load
//         moves past an atomic.
// status  compiled and emulated; not yet run on silicon
#include "reduce.cuh"
#include "workspace.cuh"

namespace autosel {
namespace {

using Mass = unsigned long long;

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kBlock = 128, kFew = 4096, kBins = 256;
constexpr int64_t kMostTokens = 1 << 20;  // a bit each in shared memory

struct Block {  // of 128 logits: the largest, and the sum of exp((z - most) / temperature)
  float most, mass;
};

template <class T> struct Rows {
  Matrix<const T> logits;
  Matrix<const int64_t> history;
  const float *temperature, *top_p, *penalty, *uniform;
  const int32_t* top_k;
  int64_t* token;
  Block* blocks;       // [B][blocks of a row]
  unsigned* counters;  // [B]
};

// --- the row --------------------------------------------------------------------------------------------------------

// Marks the tokens below `tokens`, from `first` on, that are in the history: one bit each. Ends with a barrier.
template <class T> __device__ void mark(const Rows<T>& r, int64_t b, int first, int tokens, uint32_t* bits) {
  for (int i = int(threadIdx.x); i < (tokens + 31) / 32; i += kThreads) bits[i] = 0;
  __syncthreads();
  for (int i = int(threadIdx.x); i < int(r.history.columns); i += kThreads) {
    const int64_t t = r.history.row(b)[i] - first;
    if (t >= 0 && t < tokens) atomicOr(&bits[t / 32], 1u << (t % 32));
  }
  __syncthreads();
}

// A penalised logit. NaN becomes -inf, which no step draws: selection needs an order; -0 becomes 0.
template <class T> struct Penalised {
  const T* logits;
  const uint32_t* bits;
  float penalty;
  int first;  // token of bit 0
  __device__ __forceinline__ float operator()(int i) const {
    float z = widen(logits[i]);
    if (bits[(i - first) / 32] >> ((i - first) % 32) & 1) z = z > 0 ? z / penalty : z * penalty;
    return z != z ? -INFINITY : z == 0 ? 0.0f : z;
  }
};

// The input of a selection: a whole row, or the tokens gathered from it.
template <class T> struct Whole {
  Penalised<T> row;
  int n;
  __device__ __forceinline__ float value(int i) const { return row(i); }
  __device__ __forceinline__ int index(int i) const { return i; }
};
struct Few {
  const float* z;
  const int* at;
  int n;
  __device__ __forceinline__ float value(int i) const { return z[i]; }
  __device__ __forceinline__ int index(int i) const { return at[i]; }
};
struct Values {  // plain numbers
  const Block* blocks;
  int n;
  __device__ __forceinline__ float value(int i) const { return __ldcg(&blocks[i].most); }
  __device__ __forceinline__ int index(int i) const { return i; }
};

// Larger floats have larger keys.
__device__ __forceinline__ uint32_t key_of(float z) {
  const uint32_t u = __float_as_uint(z);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Kept: a key larger than `edge`, or an equal key and an index of at most `last`.
struct Cut {
  uint32_t edge;
  int last;
  __device__ __forceinline__ bool keeps(uint32_t key, int index) const {
    return key > edge || (key == edge && index <= last);
  }
};

struct Weigh {  // exp((z - most) / temperature) as an integer; sums of V of them fit 62 bits
  float most, over_t, scale;
  __device__ __forceinline__ Mass operator()(float z) const {
    return Mass((z == most ? 1.0f : expf((z - most) * over_t)) * scale);
  }
};

// --- over the block -------------------------------------------------------------------------------------------------

struct Room {  // shared memory
  Mass bins[kBins];
  Mass warps[kWarps + 1];
  Mass found[2];
  float few_z[kFew];
  int few_at[kFew];
  unsigned flag;
  int one;
};

__device__ __forceinline__ Mass lanes_scan(Mass v) {  // inclusive
  const int lane = int(threadIdx.x) % kWarp;
#pragma unroll
  for (int by = 1; by < kWarp; by *= 2) {
    const Mass below = __shfl_up_sync(kAll, v, unsigned(by));
    if (lane >= by) v += below;
  }
  return v;
}

// Return the sum over all threads before this one; `total`: over all. Two barriers.
__device__ Mass block_scan(Mass v, Room& room, Mass& total) {
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const Mass to_here = lanes_scan(v);
  __syncthreads();
  if (lane == kWarp - 1) room.warps[warp] = to_here;
  __syncthreads();
  Mass before = 0;
  total = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += room.warps[i];
    total += room.warps[i];
  }
  return before + to_here - v;
}

// Return the smallest key with weight such that less than `wanted` of the weight is above it; `above`: that weight.
// weight(z, index) is called for every element; elements of weight 0 are ignored. From the top byte down: a histogram
// of weight, then the bin in which `wanted` is reached.
template <class List, class Weight>
__device__ uint32_t select(const List& list, const Weight& weight, Mass wanted, Room& room, Mass& above) {
  uint32_t key = 0;
  above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = int(threadIdx.x); i < kBins; i += kThreads) room.bins[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = int(threadIdx.x); i < list.n; i += kThreads) {
      const float z = list.value(i);
      const uint32_t k = key_of(z);
      if (shift < 24 && (k ^ key) >> (shift + 8)) continue;
      const Mass w = weight(z, list.index(i));
      if (w) atomicAdd(&room.bins[k >> shift & 255], w);
    }
    __syncthreads();
    if (threadIdx.x < kWarp) {  // lane l: bins 255 - 8 l down to 248 - 8 l
      const int top = kBins - 1 - 8 * int(threadIdx.x);
      Mass own = 0;
      for (int i = 0; i < 8; ++i) own += room.bins[top - i];
      Mass before = above + lanes_scan(own) - own, at_bin = 0;
      int bin = -1;
      for (int i = 0; i < 8; ++i) {
        const Mass here = room.bins[top - i];
        if (here && before < wanted) bin = top - i, at_bin = before;
        before += here;
      }
      const unsigned have = __ballot_sync(kAll, bin >= 0);
      if (have && int(threadIdx.x) == 31 - __clz(int(have))) room.found[0] = Mass(bin), room.found[1] = at_bin;
      if (!have && threadIdx.x == 0) room.found[0] = 0, room.found[1] = above;
    }
    __syncthreads();
    key |= uint32_t(room.found[0]) << shift, above = room.found[1];
    __syncthreads();
  }
  return key;
}

// Return the index of the first element, in order, at which the cumulative weight exceeds target(total); -1: there is
// none.
template <class List, class Weight, class Target>
__device__ int locate(const List& list, const Weight& weight, const Target& target, Room& room) {
  const int each = (list.n + kThreads - 1) / kThreads, from = min(int(threadIdx.x) * each, list.n);
  const int to = min(from + each, list.n);
  Mass own = 0, total;
  for (int i = from; i < to; ++i) own += weight(list.value(i), list.index(i));
  if (threadIdx.x == 0) room.one = -1;
  Mass before = block_scan(own, room, total);
  const Mass wanted = target(total);
  if (before <= wanted && wanted < before + own) {  // one thread at most
#pragma unroll 1
    for (int i = from; i < to; ++i) {
      before += weight(list.value(i), list.index(i));
      if (before > wanted) {
        room.one = list.index(i);
        break;
      }
    }
  }
  __syncthreads();
  const int found = room.one;
  __syncthreads();
  return found;
}

// Gathers tokens of at least `from` into shared memory, in index order; returns their number, or kFew + 1 if there are
// too many.
template <class T>
__device__ int gather(const Penalised<T>& row, int tokens, const Block* blocks, float from, Room& room) {
  const int count = (tokens + kBlock - 1) / kBlock, lane = int(threadIdx.x) % kWarp;
  const int each = (count + kWarps - 1) / kWarps, warp = int(threadIdx.x) / kWarp;
  const int first = min(warp * each, count), end = min(first + each, count);
  int place = 0, all = 0;
  for (int pass = 0; pass < 2; ++pass) {  // first the number, then the position
    int found = place;
    for (int b = first; b < end; ++b) {
      if (!(__ldcg(&blocks[b].most) >= from)) continue;  // the same for the whole warp
#pragma unroll
      for (int j = 0; j < kBlock; j += kWarp) {
        const int i = b * kBlock + j + lane;
        const float z = i < tokens ? row(i) : -INFINITY;
        const bool in = i < tokens && z >= from;
        const unsigned who = __ballot_sync(kAll, in);
        const int at = found + __popc(who & ((1u << lane) - 1));
        if (pass == 1 && in) room.few_z[at] = z, room.few_at[at] = i;
        found += __popc(who);
      }
    }
    if (pass == 1) break;
    Mass total;
    place = int(block_scan(lane == 0 ? Mass(found) : 0, room, total));
    place = __shfl_sync(kAll, place, 0);
    if (total > Mass(kFew)) return kFew + 1;
    all = int(total);
  }
  __syncthreads();
  return all;
}

// --- a row's token --------------------------------------------------------------------------------------------------

struct Wishes {
  float temperature, top_p, uniform;
  int top_k;
};

// Return the index of the last of the first `left` elements with this key; with fewer there is no need to search.
template <class List>
__device__ int last_of_ties(const List& list, uint32_t key, const Cut& cut, Mass left, Room& room) {
  const auto tied = [&](float z, int i) { return Mass(key_of(z) == key && cut.keeps(key, i)); };
  const int found = locate(list, tied, [&](Mass) { return left - 1; }, room);
  return found < 0 ? 0x7fffffff : found;
}

// `whole`: the mass of the row, of which the list may lack tokens below every edge; 0: the mass of the list.
template <class List>
__device__ int draw(const List& list, const Wishes& wish, const Weigh& weigh, Mass whole, Room& room) {
  Cut cut{0, 0x7fffffff};
  Mass above;
  if (wish.top_k > 0 && wish.top_k < list.n) {
    const Mass k = Mass(wish.top_k);
    const uint32_t edge = select(list, [](float, int) { return Mass(1); }, k, room, above);
    cut = Cut{edge, last_of_ties(list, edge, cut, k - above, room)};
  }
  const auto kept = [&](float z, int i) { return cut.keeps(key_of(z), i) ? weigh(z) : Mass(0); };
  if (wish.top_p < 1.0f) {
    Mass total = whole, own = 0;
    if (!whole) {
#pragma unroll 1
      for (int i = int(threadIdx.x); i < list.n; i += kThreads) own += kept(list.value(i), list.index(i));
      block_scan(own, room, total);
    }
    const double share = ceil(double(wish.top_p) * double(total));
    const Mass wanted = share >= 1.0 ? Mass(share) : 1;  // at least one token stays
    const uint32_t edge = select(list, kept, wanted, room, above);
    const Mass each = weigh(value_of(edge));
    const Mass left = each ? (wanted - above + each - 1) / each : 0;
    if (each) {
      const int last = last_of_ties(list, edge, cut, left, room);
      cut = Cut{edge, edge == cut.edge ? min(last, cut.last) : last};
    }
  }
  return locate(list, kept,
                [&](Mass total) {
                  const Mass at = Mass(double(wish.uniform) * double(total));
                  return at < total ? at : total - 1;
                },
                room);
}

// Return the largest of the blocks' maxima, and the lowest block that has it.
__device__ float top_of(const Block* blocks, int count, Room& room, int& where) {
  float most = -INFINITY;
  for (int i = int(threadIdx.x); i < count; i += kThreads) most = fmaxf(most, __ldcg(&blocks[i].most));
  most = lanes_max(most);
  float* shared = reinterpret_cast<float*>(room.bins);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = most;
  if (threadIdx.x == 0) room.one = 0x7fffffff;
  __syncthreads();
  for (int i = 0; i < kWarps; ++i) most = fmaxf(most, shared[i]);
  for (int i = int(threadIdx.x); i < count; i += kThreads)
    if (__ldcg(&blocks[i].most) == most) atomicMin(&room.one, i);
  __syncthreads();
  where = room.one;
  __syncthreads();
  return most;
}

template <class T>
__device__ int token_of(const Rows<T>& r, int64_t b, const Block* blocks, Room& room, uint32_t* bits) {
  const int tokens = int(r.logits.columns), count = (tokens + kBlock - 1) / kBlock;
  const Wishes wish{r.temperature[b], r.top_p[b], r.uniform[b], r.top_k[b]};
  mark(r, b, 0, tokens, bits);
  const Penalised<T> row{r.logits.row(b), bits, r.penalty[b], 0};
  int where;
  const float most = top_of(blocks, count, room, where);
  if (most == -INFINITY) return 0;  // nothing to draw from: any token
  const Whole<T> all{row, tokens};
  if (!(wish.temperature > 0)) {
    if (threadIdx.x == 0) room.one = 0x7fffffff;
    __syncthreads();
    for (int i = where * kBlock + int(threadIdx.x); i < min(tokens, (where + 1) * kBlock); i += kThreads)
      if (row(i) == most) atomicMin(&room.one, i);
    __syncthreads();
    return room.one;
  }
  int bits_of_sum = 62;
  while ((int64_t(1) << (62 - bits_of_sum)) < tokens) --bits_of_sum;
  const Weigh weigh{most, 1.0f / wish.temperature, float(Mass(1) << bits_of_sum)};
  const bool some_k = wish.top_k > 0 && wish.top_k < tokens, some_p = wish.top_p < 1.0f;
  float from = -INFINITY;
  Mass above, whole = 0;
  if (some_k && wish.top_k <= count)
    from = value_of(select(Values{blocks, count}, [](float, int) { return Mass(1); }, Mass(wish.top_k), room, above));
  if (some_p && !some_k) {
    float mass = 0;
    for (int i = int(threadIdx.x); i < count; i += kThreads) {
      const float top = __ldcg(&blocks[i].most);
      if (top > -INFINITY) mass += __ldcg(&blocks[i].mass) * (top == most ? 1.0f : expf((top - most) * weigh.over_t));
    }
    const float total = block_sum(mass, reinterpret_cast<float*>(room.bins));
    // A thousandth of a temperature lower, to allow for the roundings of exp and log.
    const float least = most + (logf((1.0f - wish.top_p) * total / float(tokens)) - 1e-3f) * wish.temperature;
    from = fmaxf(from, least), whole = Mass(total * weigh.scale);
    __syncthreads();
  }
  const int n = some_k || some_p ? gather(row, tokens, blocks, from, room) : kFew + 1;
  if (n > kFew) return draw(all, wish, weigh, whole, room);
  return draw(Few{room.few_z, room.few_at, n}, wish, weigh, whole, room);
}

// --- the kernel -----------------------------------------------------------------------------------------------------

template <class T> __global__ void __launch_bounds__(kThreads) sample_rows(Rows<T> r) {
  release_dependents();
  wait_for_producers();
  Room& room = *reinterpret_cast<Room*>(shared_memory());
  uint32_t* bits = reinterpret_cast<uint32_t*>(shared_memory() + sizeof(Room));
  const int64_t b = blockIdx.y;
  const int tokens = int(r.logits.columns), count = (tokens + kBlock - 1) / kBlock;
  const int each = (count + int(gridDim.x) - 1) / int(gridDim.x), first = min(int(blockIdx.x) * each, count);
  const int end = min(first + each, count), lane = int(threadIdx.x) % kWarp;
  Block* blocks = r.blocks + b * count;
  const float over_t = r.temperature[b] > 0 ? 1.0f / r.temperature[b] : 0.0f;
  mark(r, b, first * kBlock, (end - first) * kBlock, bits);
  const Penalised<T> row{r.logits.row(b), bits, r.penalty[b], first * kBlock};
  for (int i = first + int(threadIdx.x) / kWarp; i < end; i += kWarps) {
    float z[kBlock / kWarp], most = -INFINITY, mass = 0;
#pragma unroll
    for (int j = 0; j < kBlock / kWarp; ++j) {
      const int at = i * kBlock + j * kWarp + lane;
      z[j] = at < tokens ? row(at) : -INFINITY;
      most = fmaxf(most, z[j]);
    }
    most = lanes_max(most);
#pragma unroll
    for (int j = 0; j < kBlock / kWarp; ++j)
      if (z[j] > -INFINITY) mass += z[j] == most ? 1.0f : expf((z[j] - most) * over_t);
    mass = lanes_sum(mass);
    if (lane == 0) blocks[i] = Block{most, mass};
  }
  if (!last_to_arrive(r.counters + b, gridDim.x, &room.flag)) return;
  const int token = token_of(r, b, blocks, room, bits);
  if (threadIdx.x == 0) r.token[b] = token < 0 ? 0 : token;
}

void sample(TensorView logits, TensorView history, TensorView temperature, TensorView top_k, TensorView top_p,
            TensorView penalty, TensorView uniform, TensorView token, int64_t ctas_per_row, int64_t pdl) {
  check_form(logits, "logits", logits, 2), check_form(history, "history", logits, 2);
  const int64_t b = logits.size(0), v = logits.size(1), blocks = (v + kBlock - 1) / kBlock;
  AUTOSEL_CHECK(ctas_per_row >= 1, "ctas_per_row is " << ctas_per_row);
  AUTOSEL_CHECK(v >= 1 && v <= kMostTokens, "sample: a vocabulary of " << v << " tokens; at most " << kMostTokens);
  AUTOSEL_CHECK(b <= 65535, "sample: more than 65535 rows");
  AUTOSEL_CHECK(is(history, kDLInt, 64) && history.size(0) == b, "history must be int64[" << b << ",L]");
  const TensorView* numbers[] = {&temperature, &top_p, &penalty, &uniform};
  const char* names[] = {"temperature", "top_p", "repetition_penalty", "uniform"};
  for (int i = 0; i < 4; ++i) {
    check_form(*numbers[i], names[i], logits, 1);
    AUTOSEL_CHECK(is(*numbers[i], kDLFloat, 32) && numbers[i]->size(0) == b, names[i] << " must be fp32[" << b << "]");
  }
  check_form(top_k, "top_k", logits, 1), check_form(token, "token", logits, 1);
  AUTOSEL_CHECK(is(top_k, kDLInt, 32) && top_k.size(0) == b, "top_k must be int32[" << b << "]");
  AUTOSEL_CHECK(is(token, kDLInt, 64) && token.size(0) == b, "token must be int64[" << b << "]");
  by_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    Stream stream(logits);
    Workspace space(stream, size_t(b * blocks) * sizeof(Block), size_t(b));
    Rows<T> rows{matrix<const T>(logits, "logits", logits),
                 {data<int64_t>(history), b, history.size(1), history.stride(0)},
                 data<float>(temperature), data<float>(top_p), data<float>(penalty), data<float>(uniform),
                 data<int32_t>(top_k), data<int64_t>(token), space.memory<Block>(), space.counters()};
    Shape shape{dim3(unsigned(std::min(ctas_per_row, blocks)), unsigned(b)), unsigned(kThreads),
                sizeof(Room) + size_t(blocks) * (kBlock / 8), pdl != 0};
    launch(shape, stream, sample_rows<T>, rows);
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(sample, autosel::sample);
