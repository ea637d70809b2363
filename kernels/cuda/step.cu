// step   one whole decode step of B <= 8 sequences over a contiguous cache in one launch: tokens -> logits[B,V]
//
// bytes   every weight and every key and value in reach, once      FLOPs   2 B (weights) + 4 B Hq D (keys)
// roofline of llama-8b at B=1, context 8192, bf16 on an H200: 16.1 GB at 4.3 TB/s are 3.74 ms; by the estimated rates
// one launch of 195 tasks takes 4.10 ms, a graph of 228 plain nodes 4.39, one of 192 dependent launches 4.16
// (knobs/gpu/persistent.py): worth a race against plain nodes only.
// knobs   (candidates/cuda/step.py; knobs/gpu/{gemv,attention,persistent}.py) for each task those of its kernel; grid:
//         every CTA that can be resident. Compiled in: AUTOSEL_M rows of x, AUTOSEL_HEAD_ROWS query rows per KV head
//         together, AUTOSEL_LANES lanes per key, AUTOSEL_UNROLL and AUTOSEL_ROWS as in gemv.cu.
// design  The host writes a list of tasks once; all CTAs go through it. A task has units (groups of weight rows, chunks
//         of keys, heads, rows of x), which CTAs take in turn; a CTA without a unit goes on to the next task at once.
//         Each task has a counter of the CTAs that finished it, and a CTA with a unit of the next task waits for all of
//         them. Before it waits, it issues the loads of its first weights (project.cuh: UNROLL vectors per lane), so
//         the stream from memory does not drain between tasks. Counters only grow and a step waits for its own
//         multiple, so nothing is cleared between steps and a captured launch can be replayed.
//         CTAs that wait for each other must all be resident: the launch is cooperative, with a grid of at most
//         occupancy x SMs, and is refused otherwise. A wait that exceeds the time limit sets the state's first word to
//         one more than its task; then no CTA waits any longer, and later steps return at once.
//         The arithmetic is that of the kernels for single ops, from the same headers and in the same order.
// idea    counters instead of grid barriers, weights before the dependency: Hazy Research's Llama megakernel.
// status  compiled and emulated; not yet run on silicon
#define AUTOSEL_THREADS 128

#include "activation.cuh"
#include "angle.cuh"
#include "attention.cuh"
#include "project.cuh"

#ifndef AUTOSEL_M
#define AUTOSEL_M 1
#endif
#ifndef AUTOSEL_HEAD_ROWS
#define AUTOSEL_HEAD_ROWS 4
#endif
#ifndef AUTOSEL_LANES
#define AUTOSEL_LANES 16
#endif

namespace autosel {
namespace {

constexpr int kM = AUTOSEL_M, kHeadRows = AUTOSEL_HEAD_ROWS, kLanes = AUTOSEL_LANES;
static_assert(kM == 1 || kM == 2 || kM == 4 || kM == 8, "rows of x at once");
constexpr int kCtas = kHeadRows < 4 ? 3 : 2;  // CTAs that an SM must be able to hold: caps the registers

// --- tasks, as the host writes them: 8-byte words, the rest of a task's slot is unused ------------------------------

constexpr int kTaskWords = 32;
enum Kind : int64_t { kEmbed, kProject, kRotate, kAttend, kNorm, kKinds };

struct Head { int64_t kind, words, units; };  // words: of the struct, so that a mismatch of host and kernel is noticed

template <class T> struct EmbedTask {
  Head head;
  const int64_t* tokens;
  const T* table;
  int64_t stride, vocabulary, rows, d;
  double scale;
  T* out;  // [rows, d]
};

// y = epilogue((norm(x) or x) @ w^T): stored, or added to `residual`, or, with a second matrix, act(gate) * up.
template <class T> struct ProjectTask {
  Head head;
  int64_t rows, n, k, split;
  const T* x;
  int64_t x_stride;
  const T* norm;  // or null
  double eps, offset;
  const T* w;
  int64_t w_stride;
  const T* up;  // or null
  int64_t up_stride, activation;
  T* y;
  int64_t y_stride;
  const T* residual;  // or null
  int64_t residual_stride;
};

// For each row the heads of q, k and v, side by side: q and k are normed if a weight is given, and rotated; q goes to
// `q`, k and v to the row's slot in the cache.
template <class T> struct RotateTask {
  Head head;
  const T* qkv;
  int64_t stride, rows, q_heads, heads, width, pairs, interleaved;
  const float* inv_freq;
  const int64_t* positions;
  const T *q_norm, *k_norm;
  double eps, offset;
  T* q;
  int64_t q_stride;
  T* cache[2];
  int64_t batch[2], head_stride[2], token[2], room;
};

template <class T> struct AttendTask {
  Head head;
  int64_t rows;
  const T* q;
  int64_t q_batch, q_head;
  T* o;
  int64_t o_batch, o_head;
  const T *k, *v;
  int64_t k_stride[3], v_stride[3];  // batch, head, token
  const int32_t* lengths;
  int64_t max_len, heads, group, width, window;
  double scale, softcap;  // as in attention.cuh's Queries
  int64_t chunk, splits;
  float* sums;
  unsigned* counters;
};

// out = rmsnorm(x), or residual + rmsnorm(x).
template <class T> struct NormTask {
  Head head;
  int64_t rows, d;
  const T* x;
  int64_t x_stride;
  const T* weight;
  double eps, offset;
  const T* residual;  // or null
  int64_t residual_stride;
  T* out;
  int64_t out_stride;
};

template <class Task> constexpr int64_t kWords = int64_t(sizeof(Task) / 8);
static_assert(sizeof(AttendTask<float>) <= 8 * kTaskWords && sizeof(RotateTask<float>) <= 8 * kTaskWords, "too long");

// --- waiting ---------------------------------------------------------------------------------------------------------

// state: why it stopped (0: it did not; else 1 + the task), steps taken, CTAs that have ended, one counter per task.
enum { kStopped, kSteps, kEnded, kCounters };

// Before a task: waits until `from` CTAs have finished the previous task in this step.
struct Wait {
  unsigned* state;
  int task;
  unsigned from, step;
  unsigned long long limit_ns;

  __device__ __forceinline__ void operator()() const {
    bool stopped = false;
    if (task > 0 && threadIdx.x == 0) {
      const unsigned* counter = state + kCounters + task - 1;
      const unsigned wanted = from * step;  // both wrap around alike
      unsigned long long since = 0;
      while (int(load_relaxed(counter) - wanted) < 0) {
        if (load_relaxed(state + kStopped) != 0) break;
        const unsigned long long now = clock_ns();
        if (since == 0) since = now;
        stopped = now - since > limit_ns;
        if (stopped) break;
        rest();
      }
      if (stopped) atomicExch(state + kStopped, unsigned(task) + 1);
      (void)load_acquired(counter);  // makes the writes of the counted CTAs visible
    }
    __syncthreads();
  }
};

// --- what a CTA does of a task ---------------------------------------------------------------------------------------
// Separate functions, except the products: inlined together they kept each other's addresses in registers, and ptxas
// spilled 288 bytes for sm_120.

template <class T> __device__ __noinline__ void embed(const EmbedTask<T>& t) {
  for (int64_t m = blockIdx.x; m < t.rows; m += gridDim.x) {
    const int64_t token = t.tokens[m];
    const bool there = token >= 0 && token < t.vocabulary;  // a token outside the table gives zeros, not other memory
    for (int64_t i = threadIdx.x; i < t.d; i += blockDim.x) {
      const float x = there ? widen(t.table[token * t.stride + i]) : 0.0f;
      t.out[m * t.d + i] = narrow<T>(x * float(t.scale));
    }
  }
}

template <class T> struct Add {
  Matrix<T> y;
  Matrix<const T> residual;
  __device__ __forceinline__ void operator()(int64_t m, int64_t n, const float (&v)[1]) const {
    y.row(m)[n] = narrow<T>(residual.at ? v[0] + widen(residual.row(m)[n]) : v[0]);
  }
};

template <class T> struct Gate {
  Matrix<T> y;
  int activation;
  __device__ __forceinline__ void operator()(int64_t m, int64_t n, const float (&v)[2]) const {
    y.row(m)[n] = narrow<T>(activate(activation, v[0]) * v[1]);
  }
};

template <class T> __device__ void project(const ProjectTask<T>& t, const Wait& wait) {
  const Matrix<const T> x{t.x, t.rows, t.k, t.x_stride};
  const Matrix<T> y{t.y, t.rows, t.n, t.y_stride};
  const Matrix<const T> first{t.w, t.n, t.k, t.w_stride};
  if (t.up) {
    const Weights<T, 2> w{{first, {t.up, t.n, t.k, t.up_stride}}, int(t.split)};
    Normed<T, kM, true> source(x, 0, t.norm, float(t.eps), float(t.offset));
    Projector<T, T, 2, kM, true>(w).run(source, Gate<T>{y, int(t.activation)}, wait);
    return;
  }
  const Weights<T, 1> w{{first}, int(t.split)};
  const Add<T> add{y, {t.residual, t.rows, t.n, t.residual_stride}};
  if (t.norm) {
    Normed<T, kM, true> source(x, 0, t.norm, float(t.eps), float(t.offset));
    Projector<T, T, 1, kM, true>(w).run(source, add, wait);
  } else {
    Plain<T, kM, true> source(x, 0);
    Projector<T, T, 1, kM, true>(w).run(source, add, wait);
  }
}

// One warp per head of a row; shared memory holds its elements meanwhile.
template <class T> __device__ __noinline__ void rotate(const RotateTask<T>& t) {
  constexpr int V = kVec<T>;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, width = int(t.width);
  T* row = reinterpret_cast<T*>(shared_memory()) + warp * ((width + V - 1) / V * V);
  const int64_t heads = t.q_heads + 2 * t.heads, count = t.rows * heads;
  for (int64_t i = int64_t(blockIdx.x) * kWarps + warp; i < count; i += int64_t(gridDim.x) * kWarps) {
    const int64_t m = i / heads, h = i % heads;
    const int which = h < t.q_heads ? 0 : h < t.q_heads + t.heads ? 1 : 2;  // q, k, v
    const T* from = t.qkv + m * t.stride + h * width;
    const T* norm = which == 0 ? t.q_norm : which == 1 ? t.k_norm : nullptr;
    const int64_t position = t.positions[m];
    float squares = 0, x[V], g[V];
    for (int at = lane * V; at < width; at += kWarp * V) {
      const uint4 raw = load_resident(from + at);
      widen<T>(raw, x);
#pragma unroll
      for (int e = 0; e < V; ++e) squares = fmaf(x[e], x[e], squares);
      store(row + at, raw);
    }
    if (norm) {
      const float rstd = rsqrtf(lanes_sum(squares) / float(width) + float(t.eps));
      for (int at = lane * V; at < width; at += kWarp * V) {
        widen<T>(load_resident(row + at), x), widen<T>(load_resident(norm + at), g);
#pragma unroll
        for (int e = 0; e < V; ++e) x[e] = x[e] * rstd * (g[e] + float(t.offset));
        store(row + at, narrow<T>(x));
      }
    }
    __syncwarp();
    if (which < 2)
      for (int p = lane; p < int(t.pairs); p += kWarp) {
        const int i0 = t.interleaved ? 2 * p : p, i1 = t.interleaved ? 2 * p + 1 : p + int(t.pairs);
        float c, s;
        cos_sin(position, t.inv_freq[p], c, s);
        const float a = widen(row[i0]), b = widen(row[i1]);
        row[i0] = narrow<T>(a * c - b * s), row[i1] = narrow<T>(b * c + a * s);
      }
    __syncwarp();
    T* to = t.q + m * t.q_stride + h * width;
    if (which > 0) {
      const int kv = which - 1;
      const int64_t head = h - t.q_heads - kv * t.heads;
      const bool there = position >= 0 && position < t.room;  // a token beyond the cache's end is not written
      to = there ? t.cache[kv] + m * t.batch[kv] + head * t.head_stride[kv] + position * t.token[kv] : nullptr;
    }
    if (to)
      for (int at = lane * V; at < width; at += kWarp * V) store(to + at, load_resident(row + at));
    __syncwarp();
  }
}

template <class T> __device__ __noinline__ void attend_all(const AttendTask<T>& t, int slots) {
  using Source = attention::Contiguous<T>;
  using A = attention::Attend<T, T, kHeadRows, kLanes, 1, Source, true>;
  attention::Queries<T> a{};
  a.q = t.q, a.q_batch = t.q_batch, a.q_head = t.q_head;
  a.o = t.o, a.o_batch = t.o_batch, a.o_head = t.o_head;
  a.lengths = t.lengths, a.length_step = 1, a.max_len = int(t.max_len);
  a.heads = int(t.heads), a.positions = 1, a.group = int(t.group), a.width = int(t.width), a.window = int(t.window);
  a.scale = float(t.scale), a.softcap = float(t.softcap);
  a.chunk = int(t.chunk), a.splits = int(t.splits), a.slots = slots, a.aligned_q = true;
  const Source source{{t.k, t.v, {t.k_stride[0], t.k_stride[1], t.k_stride[2]}, {t.v_stride[0], t.v_stride[1], t.v_stride[2]}}};
  const unsigned tiles = unsigned(t.heads) * ((unsigned(t.group) + kHeadRows - 1) / kHeadRows), splits = unsigned(t.splits);
  for (unsigned unit = blockIdx.x; unit < splits * tiles * unsigned(t.rows); unit += gridDim.x) {
    const attention::Seat seat{unit % splits, unit / splits % tiles, tiles, unit / splits / tiles};
    const attention::Task task = attention::task_of<kHeadRows>(a, seat);
    if (int(seat.split) >= task.active) continue;
    A part(a, source, task);
    part.take_queries();
    part.walk();
    part.lay_out();
    attention::finish<kHeadRows, A::kWide>(a, task, {t.sums, t.counters}, seat);
    __syncthreads();  // the next unit's ring overwrites these sums
  }
}

template <class T> __device__ __noinline__ void norm(const NormTask<T>& t) {
  constexpr int V = kVec<T>;
  float* scratch = reinterpret_cast<float*>(shared_memory());
  for (int64_t m = blockIdx.x; m < t.rows; m += gridDim.x) {
    const T* from = t.x + m * t.x_stride;
    float squares = 0, x[V], g[V], r[V];
    for (int64_t i = int64_t(threadIdx.x) * V; i < t.d; i += int64_t(blockDim.x) * V) {
      widen<T>(load_resident(from + i), x);
#pragma unroll
      for (int e = 0; e < V; ++e) squares = fmaf(x[e], x[e], squares);
    }
    const float rstd = rsqrtf(block_sum(squares, scratch) / float(t.d) + float(t.eps));
    for (int64_t i = int64_t(threadIdx.x) * V; i < t.d; i += int64_t(blockDim.x) * V) {
      widen<T>(load_resident(from + i), x), widen<T>(load_resident(t.weight + i), g);
#pragma unroll
      for (int e = 0; e < V; ++e) x[e] = x[e] * rstd * (g[e] + float(t.offset));
      if (t.residual) {
        widen<T>(load_resident(t.residual + m * t.residual_stride + i), r);
#pragma unroll
        for (int e = 0; e < V; ++e) x[e] += r[e];
      }
      store(t.out + m * t.out_stride + i, narrow<T>(x));
    }
    __syncthreads();  // the next row's sums use the same memory
  }
}

template <class Task> __host__ __device__ __forceinline__ const Task& as(const int64_t* words) {
  return *reinterpret_cast<const Task*>(words);
}

// CTAs that take part in a task.
__device__ __forceinline__ unsigned takers(const int64_t* words) {
  const int64_t units = as<Head>(words).units;
  return unsigned(units < int64_t(gridDim.x) ? units : int64_t(gridDim.x));
}

template <class T>
__global__ void __launch_bounds__(kThreads, kCtas)
    step_walk(const int64_t* program, int tasks, unsigned* state, unsigned long long* times, int slots,
              unsigned long long limit_ns) {
  if (load_acquired(state + kStopped) != 0) return;
  const unsigned step = load_acquired(state + kSteps) + 1;
  for (int i = 0; i < tasks; ++i) {
    const int64_t* words = program + int64_t(i) * kTaskWords;
    const int64_t kind = as<Head>(words).kind;
    // The previous task's value is read again: kept from task to task, it took a register of the products.
    const unsigned ahead = i > 0 ? takers(words - kTaskWords) : 0;
    if (blockIdx.x < takers(words)) {
      const Wait wait{state, i, ahead, step, limit_ns};
      if (kind == kProject) {
        project(as<ProjectTask<T>>(words), wait);
      } else {
        wait();
        if (kind == kEmbed) embed(as<EmbedTask<T>>(words));
        else if (kind == kRotate) rotate(as<RotateTask<T>>(words));
        else if (kind == kAttend) attend_all(as<AttendTask<T>>(words), slots);
        else norm(as<NormTask<T>>(words));
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        add_released(state + kCounters + i, 1);
        if (times) atomicMax(times + i, clock_ns());
      }
    }
  }
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicInc(state + kEnded, gridDim.x - 1) == gridDim.x - 1) add_released(state + kSteps, 1);
  }
}

// --- host ------------------------------------------------------------------------------------------------------------

template <class T> size_t shared_bytes(int64_t slots) {
  using A = attention::Attend<T, T, kHeadRows, kLanes, 1, attention::Contiguous<T>, true>;
  const size_t ring = size_t(slots) * attention::kWarps * A::kSlotBytes;
  const size_t split = 2 * kWarps * Projector<T, T, 2, kM, true>::kPartial * sizeof(float);
  const size_t rows = size_t(kWarps) * (A::kWide * sizeof(T) + 16);
  return std::max(std::max(ring, attention::join_bytes(kHeadRows, A::kWide)), std::max(split, rows));
}

// CTAs of this kernel that the tensor's device can hold at once.
template <class T> int64_t resident(const Stream& stream, size_t bytes) {
  const void* kernel = reinterpret_cast<const void*>(step_walk<T>);
  permit_shared(kernel, stream, bytes);
  int sms = 0, ctas = 0, cooperative = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, stream.device()), "multiprocessors");
  check(cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, stream.device()), "cooperative launch");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, kThreads, bytes), "occupancy");
  AUTOSEL_CHECK(cooperative != 0, "this device launches no kernels whose CTAs wait for each other");
  return int64_t(sms) * ctas;
}

// found int64[1] on the host: the CTAs that `like`'s device holds at once; a larger launch is refused. Raises
// ValueError if there are no cooperative launches.
void step_resident(TensorView like, int64_t slots, TensorView found) {
  AUTOSEL_CHECK(found.device().device_type == kDLCPU && is(found, kDLInt, 64) && found.numel() == 1, "found is int64[1]");
  AUTOSEL_CHECK(slots >= 2 && slots <= attention::kMostSlots, "slots is " << slots);
  int64_t most = 0;
  by_dtype(like, [&](auto tag) {
    using T = decltype(tag);
    Stream stream(like);
    const size_t bytes = shared_bytes<T>(slots);
    if (bytes <= most_shared(stream)) most = resident<T>(stream, bytes);
  });
  *data<int64_t>(found) = most;
}

// program int64 [tasks, kTaskWords] and state int32 [kCounters + tasks] on `like`'s device; grid 0: as many as can be
// resident. Raises ValueError for a larger grid. Does not check the program: step_check did, on the host. times int64
// [tasks], if given: when the last CTA finished each task, by the device's clock, in ns.
void step(TensorView program, TensorView state, Optional<TensorView> times, TensorView like, int64_t grid, int64_t slots,
          int64_t limit_us) {
  check_form(program, "program", program, 2), check_form(state, "state", program, 1);
  const int64_t tasks = program.size(0);
  AUTOSEL_CHECK(is(program, kDLInt, 64) && program.size(1) == kTaskWords && tasks >= 1,
                "a program is int64[tasks, " << kTaskWords << "]");
  AUTOSEL_CHECK(tasks == 1 || program.stride(0) == kTaskWords, "a program is contiguous");
  AUTOSEL_CHECK(is(state, kDLInt, 32) && state.size(0) == kCounters + tasks, "state is int32[" << kCounters + tasks << "]");
  if (times) {
    check_form(*times, "times", program, 1);
    AUTOSEL_CHECK(is(*times, kDLInt, 64) && times->size(0) == tasks, "times is int64[" << tasks << "]");
  }
  AUTOSEL_CHECK(slots >= 2 && slots <= attention::kMostSlots, "slots is " << slots);
  AUTOSEL_CHECK(limit_us >= 1, "a watchdog of " << limit_us << " us");
  by_dtype(like, [&](auto tag) {
    using T = decltype(tag);
    Stream stream(program);
    const size_t bytes = shared_bytes<T>(slots);
    AUTOSEL_CHECK(bytes <= most_shared(stream), "step: " << bytes << " bytes of shared memory are more than the device has");
    const int64_t most = resident<T>(stream, bytes), ctas = grid ? grid : most;
    AUTOSEL_CHECK(ctas >= 1 && ctas <= most, "step: " << ctas << " CTAs, of which " << most << " can be resident at once");
    Shape shape{dim3(unsigned(ctas)), unsigned(kThreads), bytes};
    shape.together = true;
    launch(shape, stream, step_walk<T>, data<const int64_t>(program), int(tasks),
           reinterpret_cast<unsigned*>(data<int32_t>(state)),
           times ? reinterpret_cast<unsigned long long*>(data<int64_t>(*times)) : nullptr, int(slots),
           (unsigned long long)(limit_us)*1000ull);
  });
}

// --- checks of a program on the host, before it goes to the device --------------------------------------------------

template <class P> bool on_16(P* p) { return p != nullptr && uintptr_t(p) % 16 == 0; }

template <class T> bool rows_of_16(int64_t stride) { return stride * int64_t(sizeof(T)) % 16 == 0; }

// Raises ValueError unless this build can do the task. `i` names it.
template <class T> void check_task(const int64_t* words, int64_t i) {
  const Head& head = as<Head>(words);
  auto fits = [&](int64_t length) {
    AUTOSEL_CHECK(head.words == length, "task " << i << " has " << head.words << " words, its kind " << length);
  };
  auto rows = [&](int64_t m) { AUTOSEL_CHECK(m >= 1 && m <= kM, "task " << i << ": " << m << " rows; this build has " << kM); };
  auto units = [&](int64_t n) {
    AUTOSEL_CHECK(head.units == n && n <= kMostElements, "task " << i << " has " << head.units << " units, expected " << n);
  };
  if (head.kind == kEmbed) {
    const auto& t = as<EmbedTask<T>>(words);
    fits(kWords<EmbedTask<T>>), rows(t.rows), units(t.rows);
    AUTOSEL_CHECK(t.tokens && t.table && t.out && t.d >= 1 && t.stride >= t.d && t.vocabulary >= 1, "task " << i << ": embed");
  } else if (head.kind == kProject) {
    const auto& t = as<ProjectTask<T>>(words);
    fits(kWords<ProjectTask<T>>), rows(t.rows);
    AUTOSEL_CHECK(t.split >= 1 && t.split <= kWarps && kWarps % t.split == 0, "task " << i << ": split_k is " << t.split);
    static_assert(AUTOSEL_ROWS == 1, "a group is a row of each matrix");
    const int64_t groups = t.n, teams = kWarps / t.split;
    units((groups + teams - 1) / teams);
    AUTOSEL_CHECK(t.n >= 1 && t.k >= 1 && t.n <= kMostElements / 2 && t.k <= kMostElements / 2, "task " << i << ": sizes");
    AUTOSEL_CHECK(!t.up || (t.norm && !t.residual), "task " << i << ": a gate has a norm and no residual");
    AUTOSEL_CHECK(!t.up || (t.activation >= kSilu && t.activation <= kGeluTanh), "task " << i << ": activation");
    bool vectors = on_16(t.x) && on_16(t.w) && t.y != nullptr && rows_of_16<T>(t.x_stride) && rows_of_16<T>(t.w_stride);
    vectors = vectors && (!t.norm || on_16(t.norm)) && (!t.up || (on_16(t.up) && rows_of_16<T>(t.up_stride)));
    AUTOSEL_CHECK(vectors, "task " << i << ": rows that are not 16-byte vectors");
  } else if (head.kind == kRotate) {
    const auto& t = as<RotateTask<T>>(words);
    fits(kWords<RotateTask<T>>), rows(t.rows);
    units((t.rows * (t.q_heads + 2 * t.heads) + kWarps - 1) / kWarps);
    AUTOSEL_CHECK(t.width >= 1 && t.width <= kLanes * kVec<T> && rows_of_16<T>(t.width), "task " << i << ": heads of " << t.width);
    AUTOSEL_CHECK(t.pairs >= 0 && 2 * t.pairs <= t.width && t.heads >= 1 && t.q_heads >= 1, "task " << i << ": heads");
    bool vectors = on_16(t.qkv) && on_16(t.q) && on_16(t.cache[0]) && on_16(t.cache[1]) && rows_of_16<T>(t.stride);
    vectors = vectors && rows_of_16<T>(t.q_stride) && (!t.q_norm || on_16(t.q_norm)) && (!t.k_norm || on_16(t.k_norm));
    for (int s = 0; s < 2; ++s)
      vectors = vectors && rows_of_16<T>(t.batch[s]) && rows_of_16<T>(t.head_stride[s]) && rows_of_16<T>(t.token[s]);
    AUTOSEL_CHECK(vectors && t.inv_freq && t.positions, "task " << i << ": rows that are not 16-byte vectors");
  } else if (head.kind == kAttend) {
    const auto& t = as<AttendTask<T>>(words);
    fits(kWords<AttendTask<T>>), rows(t.rows);
    units(t.splits * t.heads * ((t.group + kHeadRows - 1) / kHeadRows) * t.rows);
    AUTOSEL_CHECK(t.width >= 1 && t.width <= kLanes * kVec<T> && rows_of_16<T>(t.width), "task " << i << ": heads of " << t.width);
    const int64_t span = t.window ? std::min(t.max_len, t.window) : t.max_len;
    AUTOSEL_CHECK(t.max_len >= 1 && t.chunk >= 1 && t.splits == (span + t.chunk - 1) / t.chunk, "task " << i << ": splits");
    AUTOSEL_CHECK(t.lengths && (t.splits == 1 || (t.sums && t.counters)), "task " << i << ": no room for splits");
    bool vectors = on_16(t.q) && on_16(t.k) && on_16(t.v) && t.o != nullptr && rows_of_16<T>(t.q_batch) && rows_of_16<T>(t.q_head);
    for (int s = 0; s < 3; ++s) vectors = vectors && rows_of_16<T>(t.k_stride[s]) && rows_of_16<T>(t.v_stride[s]);
    AUTOSEL_CHECK(vectors, "task " << i << ": rows that are not 16-byte vectors");
  } else {
    AUTOSEL_CHECK(head.kind == kNorm, "task " << i << " is of kind " << head.kind);
    const auto& t = as<NormTask<T>>(words);
    fits(kWords<NormTask<T>>), rows(t.rows), units(t.rows);
    bool vectors = on_16(t.x) && on_16(t.weight) && on_16(t.out) && rows_of_16<T>(t.d) && rows_of_16<T>(t.x_stride);
    vectors = vectors && rows_of_16<T>(t.out_stride) && (!t.residual || (on_16(t.residual) && rows_of_16<T>(t.residual_stride)));
    AUTOSEL_CHECK(vectors && t.d >= 1, "task " << i << ": rows that are not 16-byte vectors");
  }
}

// program: the words on the host. Raises ValueError for a program that must not run on a device.
void step_check(TensorView program, TensorView like) {
  AUTOSEL_CHECK(program.device().device_type == kDLCPU && program.ndim() == 2 && is(program, kDLInt, 64) &&
                    program.size(1) == kTaskWords && (program.size(0) == 1 || program.stride(0) == kTaskWords),
                "a program is int64[tasks, " << kTaskWords << "] on the host");
  by_dtype(like, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t i = 0; i < program.size(0); ++i) check_task<T>(data<const int64_t>(program) + i * kTaskWords, i);
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(step, autosel::step);
AUTOSEL_EXPORT(step_check, autosel::step_check);
AUTOSEL_EXPORT(step_resident, autosel::step_resident);
