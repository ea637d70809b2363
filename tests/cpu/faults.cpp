// Ways in which native code goes wrong, for tests of what contains it.
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

extern "C" {

int null_read() { return *static_cast<volatile int*>(nullptr); }
void abort_now() { abort(); }
void illegal_instruction() { __builtin_trap(); }
int stack_overflow(int depth) {
  volatile char frame[4096];
  frame[0] = char(depth);
  return stack_overflow(depth + 1) + frame[0];
}
void heap_corruption() {
  char* volatile p = static_cast<char*>(malloc(1 << 16));
  for (int i = -16; i < 16; ++i) static_cast<volatile char*>(p)[i] = 0x41;  // the allocator's own words before it
  free(p);
}
void exit_without_a_word() { _exit(0); }
void spin() {
  for (volatile unsigned long i = 0;; ++i) {
  }
}
void signal_proof_spin() {
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);
  spin();
}
// Touches `bytes` of shared memory, which no limit on private memory counts.
int shared_hog(unsigned long bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return 1;
  memset(p, 1, bytes);
  return 0;
}

}  // extern "C"
