// The functions of NVML that a fingerprint uses, for two boards, so that nvidia-ml-py makes its real calls. Boards have
// no numbers here. The second board is another product without MIG, whose driver has only the older name of the reasons
// for slow clocks.
// Environment variables of the stand-in. INIT=code: the result of nvmlInit. SLICES=n: MIG divides the first board into
// n slices. SHARED=1: a chip that shares its host's memory, which NVML does not describe, in a container that may not
// query ECC.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, FUNCTION_NOT_FOUND = 13 };
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct Device* Handle;

unsigned neighbour = 0;  // a process that computes on every board, or 0
int slow_looks = 0;  // how many more times the board reports a slowdown by heat; it always reports a power cap (0x4)
static char board, other, slices[7];
static int is_other(Handle d) { return (char*)d == &other; }
static int setting(const char* name) { const char* n = getenv(name); return n ? atoi(n) : 0; }
static int count(void) { return setting("SLICES"); }
static int shared(void) { return setting("SHARED"); }
static int is_slice(Handle d) { return (char*)d >= slices && (char*)d < slices + sizeof slices; }

int nvmlInitWithFlags(unsigned flags) { (void)flags; return setting("INIT"); }
int nvmlShutdown(void) { return OK; }
const char* nvmlErrorString(int code) { return code == NOT_FOUND ? "Not Found" : "Not Supported"; }
int nvmlSystemGetDriverVersion(char* text, unsigned room) { snprintf(text, room, "580.65.06"); return OK; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* pci, Handle* d) {
  int second = !strcmp(pci, "0000:0b:00.0");
  *d = (Handle)(second ? &other : &board);
  return second || !strcmp(pci, "0000:0a:00.0") ? OK : NOT_FOUND;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, Handle* d) {
  *d = strncmp(uuid, "MIG-", 4) ? (Handle)(strncmp(uuid, "GPU-11", 6) ? &board : &other) : (Handle)slices;
  return OK;
}
int nvmlDeviceGetName(Handle d, char* text, unsigned room) {
  snprintf(text, room, is_slice(d) ? "NVIDIA H200 MIG 1g.18gb" : is_other(d) ? "NVIDIA L4" : "NVIDIA H200");
  return OK;
}
int nvmlDeviceGetMemoryInfo(Handle d, Memory* m) {
  m->total = is_slice(d) ? 18ull << 30 : is_other(d) ? 23ull << 30 : 140ull << 30, m->free = m->total, m->used = 0;
  return shared() ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetMemoryBusWidth(Handle d, unsigned* bits) {
  *bits = is_other(d) ? 192 : 6144;
  return shared() ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetMaxClockInfo(Handle d, int type, unsigned* mhz) {
  (void)d, *mhz = type == 2 ? 3201 : 1980;
  return shared() && type == 2 ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetEccMode(Handle d, unsigned* now, unsigned* then) {
  (void)d, *now = *then = 1;
  return shared() ? NO_PERMISSION : OK;
}
int nvmlDeviceGetEnforcedPowerLimit(Handle d, unsigned* mw) { (void)d; (void)mw; return NOT_SUPPORTED; }
int nvmlDeviceGetUUID(Handle d, char* text, unsigned room) {
  if (is_other(d)) snprintf(text, room, "GPU-11121314-1516-1718-191a-1b1c1d1e1f20");
  else if (!is_slice(d)) snprintf(text, room, "GPU-01020304-0506-0708-090a-0b0c0d0e0f10");
  else snprintf(text, room, "MIG-0102%02x04-0506-0708-090a-0b0c0d0e0f10", (int)((char*)d - slices));
  return OK;
}
int nvmlDeviceGetMigMode(Handle d, unsigned* now, unsigned* then) {
  *now = *then = count() > 0 && !is_other(d);
  return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(Handle d, unsigned* n) { (void)d; *n = sizeof slices; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(Handle d, unsigned i, Handle* found) {
  (void)d;
  *found = (Handle)&slices[i];
  return (int)i < count() ? OK : NOT_FOUND;
}
// For a slice, like the driver: not supported.
int nvmlDeviceGetCurrentClocksEventReasons(Handle d, unsigned long long* bits) {
  if (is_other(d)) return FUNCTION_NOT_FOUND;
  *bits = slow_looks-- > 0 ? 0x20 | 0x4 : (slow_looks = 0, 0x4);
  return is_slice(d) ? INVALID_ARGUMENT : OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Handle d, unsigned long long* bits) {
  *bits = is_other(d) ? 0x80 : 0;
  return OK;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle d, Handle* found) {
  *found = (Handle)&board;
  return is_slice(d) ? OK : INVALID_ARGUMENT;
}
// nvmlProcessInfo_t of nvml.h.
struct Process { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(Handle d, unsigned* count, struct Process* found) {
  (void)d;
  unsigned room = *count;
  *count = neighbour ? 1 : 0;
  if (!neighbour) return OK;
  if (room < 1) return INSUFFICIENT_SIZE;
  *found = (struct Process){.pid = neighbour};
  return OK;
}
// Like a board: some readings give the same value, then the next.
int nvmlDeviceGetTotalEnergyConsumption(Handle d, unsigned long long* mj) {
  static unsigned long long readings;
  *mj = 1000 + readings++ / 8 * 300;
  return is_slice(d) ? NOT_SUPPORTED : OK;
}
