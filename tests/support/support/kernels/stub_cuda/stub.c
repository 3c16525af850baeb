// A CUDA driver without a device: it loads any module, counts launches, and keeps the last one.
#include <cuda.h>
#include <stdint.h>
#include <string.h>

enum { MOST_ARGUMENTS = 32, REGISTERS = 96, SHARED = 101376 };

struct launch {
  uint64_t count, function;
  uint32_t grid[3], threads, shared, attributes;
  uint8_t sizes[MOST_ARGUMENTS];  // of arguments to keep, set by who reads them; 0 ends
  uint64_t arguments[MOST_ARGUMENTS];
} last_launch;

static int num_functions;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  return *value = SHARED, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  return *context = (CUcontext)1, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit which) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit which, size_t value) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) {
  return *text = "none", CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  return *module = (CUmodule)1, CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  return *function = (CUfunction)(uintptr_t)++num_functions, CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS               ? REGISTERS
           : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                                                              : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
  return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute which, CUdeviceptr pointer) {
  return *(CUdeviceptr *)data = pointer, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *how) {
  return *count = 1, CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **values,
                          void **more) {
  last_launch.count++;
  last_launch.function = (uintptr_t)function;
  last_launch.grid[0] = how->gridDimX, last_launch.grid[1] = how->gridDimY;
  last_launch.grid[2] = how->gridDimZ, last_launch.threads = how->blockDimX;
  last_launch.shared = how->sharedMemBytes, last_launch.attributes = how->numAttrs;
  memset(last_launch.arguments, 0, sizeof last_launch.arguments);
  for (int i = 0; i < MOST_ARGUMENTS && last_launch.sizes[i]; i++)
    memcpy(&last_launch.arguments[i], values[i], last_launch.sizes[i]);
  return CUDA_SUCCESS;
}
