// The OpenMP runtime that PyTorch has loaded into this process, if there is one.
//
// Kernels run on its threads, because a second pool would compete with it for the same cores. It is looked up, not
// linked: the wheel brings its own copy (torch/lib/libgomp.so.1), and a preloaded libiomp5 exports the same names. A
// process without a runtime uses Helpers instead (team.h).
#pragma once
#include "system.h"

namespace autosel {
namespace team_v2 {

struct OpenMP {
  using Body = void (*)(void* context);
  void (*parallel)(Body body, void* context, unsigned threads, unsigned flags) = nullptr;  // runs body in each thread
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
  int (*max_threads)() = nullptr;
  int (*proc_bind)() = nullptr;

  explicit operator bool() const { return parallel != nullptr; }
  bool bound() const { return proc_bind() != 0; }  // OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY: threads have places
};

// Return the runtime whose GOMP_parallel `scope` finds; empty if it lacks one of the functions.
static inline OpenMP openmp_in(void* scope) {
  void* parallel = dlsym(scope, "GOMP_parallel");
  Dl_info owner;
  if (parallel == nullptr || dladdr(parallel, &owner) == 0) return {};
  void* library = dlopen(owner.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return {};
  void* found[] = {dlsym(library, "omp_get_thread_num"), dlsym(library, "omp_get_num_threads"),
                   dlsym(library, "omp_get_max_threads"), dlsym(library, "omp_get_proc_bind")};
  for (void* function : found)
    if (function == nullptr) return {};
  OpenMP made;
  memcpy(&made.parallel, &parallel, sizeof parallel);
  memcpy(&made.thread_num, found, sizeof found);
  return made;
}

// A runtime that was used before a fork hangs in the child: its threads are gone and it waits for them. Such a child
// has the flag PF_FORKNOEXEC until it executes another program.
static inline bool forked_without_exec() {
  constexpr unsigned kForkNoExec = 0x40;
  FILE* file = fopen("/proc/self/stat", "r");
  if (file == nullptr) return false;
  char text[1024] = "";
  size_t count = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[count] = 0;
  const char* after_name = strrchr(text, ')');
  unsigned flags = 0;
  return after_name && sscanf(after_name, ") %*c %*d %*d %*d %*d %*d %u", &flags) == 1 && (flags & kForkNoExec);
}

// A preloaded runtime first, because PyTorch calls that one too; then PyTorch's own; then any loaded one.
static inline OpenMP find_openmp() {
  if (forked_without_exec()) return {};
  if (OpenMP preloaded = openmp_in(RTLD_DEFAULT)) return preloaded;
  for (const char* name : {"libtorch_cpu.so", "libgomp.so.1"})
    if (void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD))
      if (OpenMP found = openmp_in(library)) return found;
  return {};
}

// Number of libraries that this process has loaded so far: while it does not change, there is no new runtime to find.
static inline unsigned long long libraries_loaded() {
  unsigned long long count = 0;
  dl_iterate_phdr([](dl_phdr_info* info, size_t, void* to) {
    *static_cast<unsigned long long*>(to) = info->dlpi_adds;
    return 1;
  }, &count);
  return count;
}

}  // namespace team_v2
}  // namespace autosel
