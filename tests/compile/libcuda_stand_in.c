// The driver functions that an identity uses, for two devices like the one that cupy_stand_in.py simulates.
#include <stdio.h>
#include <string.h>

enum { OK = 0, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_VALUE = 1 };
static int initialized;

int cuInit(unsigned flags) { initialized = 1; return flags ? INVALID_VALUE : OK; }
int cuGetErrorString(int code, const char** text) {
  *text = code == INVALID_DEVICE ? "invalid device ordinal" : "not initialized";
  return OK;
}
int cuDeviceGetCount(int* count) { *count = 2; return initialized ? OK : NOT_INITIALIZED; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal + 70; return ordinal < 2 ? OK : INVALID_DEVICE; }
static int known(int device) { return device == 70 || device == 71 ? OK : INVALID_DEVICE; }

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {  // cuda.h
    case 16: *value = 2; break;        // MULTIPROCESSOR_COUNT
    case 38: *value = 2 << 20; break;  // L2_CACHE_SIZE
    case 39: *value = 512; break;      // MAX_THREADS_PER_MULTIPROCESSOR
    case 75: *value = 9; break;        // COMPUTE_CAPABILITY_MAJOR
    case 76: *value = 0; break;
    case 81: *value = 233472; break;   // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    case 82: *value = 65536; break;    // MAX_REGISTERS_PER_MULTIPROCESSOR
    case 97: *value = 232448; break;   // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    case 106: *value = 32; break;      // MAX_BLOCKS_PER_MULTIPROCESSOR
    default: return INVALID_VALUE;
  }
  return known(device);
}
int cuDeviceGetPCIBusId(char* text, int room, int device) {
  snprintf(text, room, "0000:0a:00.0");
  return known(device);
}
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  for (int i = 0; i < 16; i++) uuid[i] = i + 1;
  return known(device);
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (size_t)128 << 30; return known(device); }
