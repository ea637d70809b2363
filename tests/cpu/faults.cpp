// Faults of native code, for tests of their containment.
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <new>
#include <stdexcept>
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

void throw_across() { throw std::runtime_error("nobody catches this"); }
// Leaves a grandchild in a separate session, whose parent has ended, and dies.
void escape_and_crash() {
  if (fork() == 0) {
    setsid();
    if (fork() == 0) {
      signal(SIGTERM, SIG_IGN);
      for (;;) pause();
    }
    _exit(0);
  }
  null_read();
}
void fork_storm() {
  for (;;) {
    if (fork() == 0) {
      setsid();
      for (;;) pause();
    }
  }
}
// Takes private memory, without touching it, until there is no more.
void memory_hog() {
  for (;;) {
    void* p = mmap(nullptr, 256ul << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
  }
}
void output_flood() {
  static char line[1 << 16];
  memset(line, 'x', sizeof line);
  line[sizeof line - 1] = '\n';
  for (int i = 0; i < 600; ++i)
    if (write(1, line, sizeof line) < 0 || write(2, line, sizeof line) < 0) return;
}
void descriptor_leak() { (void)!open("/dev/null", O_RDONLY); }
// Sends half a frame on every stream socket of the process, then nothing.
void half_reply() {
  const unsigned char begun[] = {100, 0, 0, 0, '{', '"'};
  for (int fd = 3; fd < 64; ++fd) (void)!write(fd, begun, sizeof begun);
  for (;;) pause();
}

}  // extern "C"
