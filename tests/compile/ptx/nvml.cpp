// `libnvidia-ml` for the same device: an idle board without MIG and without other processes.
#include <cstdio>
#include <cstring>

#include "device.h"

namespace {
enum Answer { kOk = 0, kInvalidArgument = 2, kNotSupported = 3, kNotFound = 6 };
char the_board;
struct Memory {
  unsigned long long total, free, used;
};
struct MemoryV2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
int text(char* out, unsigned room, const char* said) { return snprintf(out, room, "%s", said), kOk; }
}  // namespace

extern "C" {

int nvmlInit_v2() { return kOk; }
int nvmlInitWithFlags(unsigned) { return kOk; }
int nvmlShutdown() { return kOk; }
const char* nvmlErrorString(int) { return "an error of NVML"; }
int nvmlSystemGetDriverVersion(char* out, unsigned room) { return text(out, room, "580.00.00"); }
int nvmlSystemGetNVMLVersion(char* out, unsigned room) { return text(out, room, "13.580.00.00"); }
int nvmlSystemGetCudaDriverVersion_v2(int* v) { return *v = 13000, kOk; }
int nvmlDeviceGetCount_v2(unsigned* n) { return *n = 1, kOk; }
int nvmlDeviceGetHandleByIndex_v2(unsigned, void** board) { return *board = &the_board, kOk; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** board) { return *board = &the_board, kOk; }
int nvmlDeviceGetHandleByUUID(const char*, void** board) { return *board = &the_board, kOk; }
int nvmlDeviceGetName(void*, char* out, unsigned room) { return text(out, room, "PTX on a CPU"); }
int nvmlDeviceGetUUID(void*, char* out, unsigned room) {
  return text(out, room, "GPU-11223344-5566-7788-99aa-bbccddeeff00");
}
int nvmlDeviceGetMemoryInfo(void*, Memory* m) {
  const auto& d = ptx::device();
  return *m = {d.total_bytes, d.total_bytes - d.used_bytes, d.used_bytes}, kOk;
}
int nvmlDeviceGetMemoryInfo_v2(void*, MemoryV2* m) {
  const auto& d = ptx::device();
  m->total = d.total_bytes, m->reserved = 0, m->free = d.total_bytes - d.used_bytes, m->used = d.used_bytes;
  return kOk;
}
int nvmlDeviceGetMemoryBusWidth(void*, unsigned* bits) { return *bits = 64, kOk; }
int nvmlDeviceGetMaxClockInfo(void*, int, unsigned* mhz) { return *mhz = 1000, kOk; }
int nvmlDeviceGetClockInfo(void*, int, unsigned* mhz) { return *mhz = 1000, kOk; }
int nvmlDeviceGetEccMode(void*, int* now, int* pending) { return *now = *pending = 0, kOk; }
int nvmlDeviceGetMigMode(void*, unsigned*, unsigned*) { return kNotSupported; }
int nvmlDeviceGetEnforcedPowerLimit(void*, unsigned* mw) { return *mw = 100000, kOk; }
int nvmlDeviceGetCurrentClocksEventReasons(void*, unsigned long long* reasons) { return *reasons = 0, kOk; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* reasons) { return *reasons = 0, kOk; }
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) { return *count = 0, kOk; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, kOk; }
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return kNotSupported; }
int nvmlDeviceGetProcessUtilization(void*, void*, unsigned* count, unsigned long long) { return *count = 0, kNotFound; }
int nvmlDeviceGetUtilizationRates(void*, unsigned* rates) { return rates[0] = rates[1] = 0, kOk; }
int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long*) { return kNotSupported; }

}  // extern "C"
