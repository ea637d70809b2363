// The greedy choice in the output head: each thread keeps the best logit of its own columns.
#pragma once
#include "project.h"

namespace autosel {

struct alignas(64) Best { float value; int64_t index; };

static inline bool beats(float challenger, float holder) {
  return challenger > holder || (challenger != challenger && holder == holder);
}

// Compares the first best of `count` logits from column n on with `best`, which is of lower columns (index -1: none).
template <class T> static inline void challenge(Best& best, int64_t n, int64_t count, const float* v) {
  T stored[kLanes];
  store(stored, load(v));
  vreg rounded = load_some(stored, count);
  float total = sum(rounded);
  // Nothing here is NaN if the sum is not (padding is zero and only raises the maximum): skip the comparison.
  if (best.index >= 0 && total == total && !beats(max(rounded), best.value)) return;
  for (int64_t c = 0; c < count; ++c)
    if (best.index < 0 || beats(widen(stored[c]), best.value)) best = {widen(stored[c]), n + c};
}

// Return the better of two; if equal, the one with the lower index.
static inline Best better(const Best& a, const Best& b) {
  if (a.index < 0 || b.index < 0) return a.index < 0 ? b : a;
  if (beats(a.value, b.value) || beats(b.value, a.value)) return beats(a.value, b.value) ? a : b;
  return a.index < b.index ? a : b;
}

// The best of `threads` threads, `stride` apart.
static inline Best best_of(const Best* held, int64_t threads, int64_t stride) {
  Best first = held[0];
  for (int64_t t = 1; t < threads; ++t) first = better(first, held[t * stride]);
  return first;
}

}  // namespace autosel
