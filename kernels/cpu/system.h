// Every header from outside kernels/ that the kernels for this CPU use. It comes first in each, so that the compiler can
// read it once for all (autosel/native/headers.py): that takes as long as the rest of a small kernel.
#ifndef AUTOSEL_SYSTEM_H
#define AUTOSEL_SYSTEM_H
#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include <dlfcn.h>
#include <link.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#endif
