/* A GPU that computes nothing: the functions of the CUDA runtime and driver that torch calls.
 *
 * Loaded before torch (LD_PRELOAD), it makes torch's CUDA build run its host code on a machine without a GPU: checks of
 * dtypes, layouts and devices, the allocator, streams, process groups, compilation. Kernels are not run, collectives return at
 * once, and device memory is address space that nobody may touch: a host that reads it dies, and a copy to the host is zeros.
 *
 * NULL_GPU_COUNT is the number of devices (1), NULL_GPU_CAPABILITY the compute capability of all: 80, 90 (default) or 100.
 * null_libraries.c has cuBLAS and NCCL; functions that are in neither are stubs that return 0, which build.py makes.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DEVICE_BYTES 85021163520ull /* of an H100 */
#define DRIVER_BYTES 600000000ull   /* of it, what a context takes */
#define CUDA_VERSION_HERE 13000
#define HOST (-1)

/* ---------------------------------------------------------------- counters, for null_gpu_count */

enum { LAUNCHES, WAITS, ALLOCATIONS, COPIES_TO_HOST, COLLECTIVES, GRAPHED, COUNTERS };
static long counters[COUNTERS];

/* The stream that is captured, if one is, and the graph that is made: what would be launched is a node of it. */
typedef struct {
  long kernels;
} Graph;
static cudaStream_t captured;
static Graph *capturing;

int null_gpu_add(int which) {
  if (capturing && (which == LAUNCHES || which == COLLECTIVES)) {
    __atomic_add_fetch(&capturing->kernels, 1, __ATOMIC_RELAXED);
    return 0;
  }
  __atomic_add_fetch(&counters[which], 1, __ATOMIC_RELAXED);
  return 0;
}

long null_gpu_count(int which) { return counters[which]; }

static int setting(const char *name, int usual) {
  const char *value = getenv(name);
  return value ? atoi(value) : usual;
}

static int devices(void) { return setting("NULL_GPU_COUNT", 1); }
static int capability(void) { return setting("NULL_GPU_CAPABILITY", 90); }

/* Streams, events, handles, modules: something that is not null and unlike any other. */
void *null_gpu_handle(void) {
  static long last = 0x1000;
  return (void *)__atomic_add_fetch(&last, 16, __ATOMIC_RELAXED);
}

static __thread int current;
static __thread cudaError_t last_error;

static cudaError_t fail(cudaError_t error) { return last_error = error; }

/* ---------------------------------------------------------------- memory: a table of ranges */

typedef struct {
  char *start;
  size_t bytes;
  int device, owned; /* owned: 1 by this library, 2 reserved addresses, whose memory is counted apart */
} Range;

static Range ranges[1 << 16];
static int range_count;
static size_t used[64];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int add_range(void *start, size_t bytes, int device, int owned) {
  int full;
  pthread_mutex_lock(&lock);
  full = range_count == sizeof ranges / sizeof *ranges;
  if (!full) ranges[range_count++] = (Range){start, bytes, device, owned};
  if (!full && device != HOST && owned != 2) used[device] += bytes;
  pthread_mutex_unlock(&lock);
  return full;
}

/* The range that has any of these bytes; removed with `take`. */
static Range find_range(const void *start, size_t bytes, int take) {
  Range found = {0};
  const char *from = start;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < range_count; i++) {
    if (from + bytes <= ranges[i].start || from >= ranges[i].start + ranges[i].bytes) continue;
    found = ranges[i];
    if (take) ranges[i] = ranges[--range_count];
    if (take && found.device != HOST && found.owned != 2) used[found.device] -= found.bytes;
    break;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

cudaError_t cudaMalloc(void **out, size_t bytes) {
  null_gpu_add(ALLOCATIONS);
  *out = NULL;
  if (!bytes) return cudaSuccess;
  if (used[current] + bytes > DEVICE_BYTES - DRIVER_BYTES) return fail(cudaErrorMemoryAllocation);
  *out = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*out == MAP_FAILED || add_range(*out, bytes, current, 1)) return fail(cudaErrorMemoryAllocation);
  return cudaSuccess;
}

cudaError_t cudaFree(void *start) {
  if (!start) return cudaSuccess;
  Range range = find_range(start, 1, 1);
  if (range.start != start) return fail(cudaErrorInvalidValue);
  munmap(start, range.bytes);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) { return cudaMalloc(out, bytes); }
cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return cudaFree(start); }

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
  if (posix_memalign(out, 4096, bytes ? bytes : 1)) return fail(cudaErrorMemoryAllocation);
  return add_range(*out, bytes ? bytes : 1, HOST, 1) ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaFreeHost(void *start) {
  if (start && find_range(start, 1, 1).start != start) return fail(cudaErrorInvalidValue);
  free(start);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void *start, size_t bytes, unsigned flags) {
  if (find_range(start, bytes, 0).start) return fail(cudaErrorHostMemoryAlreadyRegistered);
  return add_range(start, bytes, HOST, 0) ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaHostUnregister(void *start) {
  Range range = find_range(start, 1, 0);
  if (range.start != start || range.owned) return fail(cudaErrorHostMemoryNotRegistered);
  find_range(start, 1, 1);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *start) {
  Range range = find_range(start, 1, 0);
  int known = range.start != NULL, on_device = known && range.device != HOST;
  memset(out, 0, sizeof *out);
  out->type = on_device ? cudaMemoryTypeDevice : known ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  out->device = on_device ? range.device : known ? 0 : -2;
  out->devicePointer = known ? (void *)start : NULL;
  out->hostPointer = known && !on_device ? (void *)start : NULL;
  return cudaSuccess;
}

/* Expandable segments: addresses are reserved once, memory of a granularity is mapped into them. */

#define GRANULARITY (2 << 20)

CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *kind, CUmemAllocationGranularity_flags which) {
  *out = GRANULARITY;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr near, unsigned long long flags) {
  void *start = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED || add_range(start, bytes, current, 2)) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = (CUdeviceptr)start;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
  if (find_range((void *)start, 1, 1).start) munmap((void *)start, bytes);
  return CUDA_SUCCESS;
}

/* A handle is the size, and the device in the bits below the granularity. */
CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *kind, unsigned long long flags) {
  int device = kind->location.id, full;
  null_gpu_add(ALLOCATIONS);
  pthread_mutex_lock(&lock);
  full = used[device] + bytes > DEVICE_BYTES - DRIVER_BYTES;
  if (!full) used[device] += bytes;
  pthread_mutex_unlock(&lock);
  *out = bytes | device;
  return full ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  pthread_mutex_lock(&lock);
  used[handle % GRANULARITY] -= handle / GRANULARITY * GRANULARITY;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr start) {
  *(CUdeviceptr *)out = start;
  return CUDA_SUCCESS;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *total = DEVICE_BYTES;
  *free_bytes = DEVICE_BYTES - DRIVER_BYTES - used[current];
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  Range source = find_range(from, 1, 0), target = find_range(to, 1, 0);
  int from_device = source.start && source.device != HOST, to_device = target.start && target.device != HOST;
  if (capturing && from_device && !to_device && !target.start) return fail(cudaErrorStreamCaptureUnsupported);
  if (!from_device && !to_device) memcpy(to, from, bytes);
  if (from_device && !to_device) null_gpu_add(COPIES_TO_HOST), memset(to, 0, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, NULL);
}

cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
  static char symbols[1 << 20];
  *out = symbols;
  return cudaSuccess;
}

/* ---------------------------------------------------------------- devices */

/* Numbers of attributes are the same in the runtime and the driver. */
static int attribute(int which) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return capability() / 10;
    case cudaDevAttrComputeCapabilityMinor: return capability() % 10;
    case cudaDevAttrMultiProcessorCount: return capability() == 80 ? 108 : capability() == 90 ? 132 : 148;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return capability() == 80 ? 166912 : 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return capability() == 80 ? 167936 : 233472;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrL2CacheSize: return 52428800;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    default: return 1;
  }
}

cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr which, int device) {
  *out = attribute(which);
  return cudaSuccess;
}

CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute which, CUdevice device) {
  *out = attribute(which);
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
  memset(out, 0, sizeof *out);
  strcpy(out->name, capability() == 80 ? "NVIDIA A100-SXM4-80GB" : capability() == 90 ? "NVIDIA H100 80GB HBM3" : "NVIDIA B200");
  out->totalGlobalMem = DEVICE_BYTES;
  out->major = capability() / 10;
  out->minor = capability() % 10;
  out->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  out->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  out->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  out->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  out->regsPerBlock = out->regsPerMultiprocessor = out->totalConstMem = 65536;
  out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxBlocksPerMultiProcessor = out->warpSize = 32;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  out->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  out->pciBusID = device;
  out->unifiedAddressing = out->concurrentKernels = out->cooperativeLaunch = 1;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return fail(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *out) { return *out = current, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *out) { return *out = devices(), cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *out) { return *out = CUDA_VERSION_HERE, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *out) { return *out = CUDA_VERSION_HERE, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *out, int device, int peer) { return *out = 1, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int device) { return snprintf(out, size, "0000:%02x:00.0", device), 0; }

CUresult cuDriverGetVersion(int *out) { return *out = CUDA_VERSION_HERE, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *out) { return *out = devices(), CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *out, int device) { return *out = device, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *out) { return *out = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) { return *out = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  return *active = 1, CUDA_SUCCESS;
}

/* ---------------------------------------------------------------- errors */

const char *cudaGetErrorString(cudaError_t error) {
  static __thread char text[64];
  snprintf(text, sizeof text, "error %d of the null GPU", error);
  return text;
}

const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
CUresult cuGetErrorString(CUresult error, const char **out) { return *out = "error of the null GPU", CUDA_SUCCESS; }

/* ---------------------------------------------------------------- streams, events, waits */

cudaError_t cudaStreamCreate(cudaStream_t *out) { return *out = null_gpu_handle(), cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { return *out = null_gpu_handle(), cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) { return *out = null_gpu_handle(), cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *out) { return *out = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) {
  return *out = capturing && stream == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *out, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *size) {
  if (id) *id = (unsigned long long)capturing;
  if (graph) *graph = (cudaGraph_t)capturing;
  if (size) *size = 0;
  return cudaStreamIsCapturing(stream, out);
}

/* Graphs: a capture counts what is launched, a launch of the graph is one. */
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  if (capturing || !stream) return fail(cudaErrorStreamCaptureUnsupported);
  captured = stream;
  capturing = calloc(1, sizeof *capturing);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out) {
  if (!capturing || stream != captured) return fail(cudaErrorStreamCaptureUnmatched);
  *out = (cudaGraph_t)capturing;
  capturing = NULL;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  return *count = ((Graph *)graph)->kernels, cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
  Graph *copy = malloc(sizeof *copy);
  *copy = *(Graph *)graph;
  return *out = (cudaGraphExec_t)copy, cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  __atomic_add_fetch(&counters[GRAPHED], ((Graph *)graph)->kernels, __ATOMIC_RELAXED);
  return null_gpu_add(LAUNCHES);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return free(graph), cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return free(graph), cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *out) { return *out = null_gpu_handle(), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) { return *out = null_gpu_handle(), cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *out, cudaEvent_t start, cudaEvent_t end) { return *out = 1, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return capturing && stream == captured ? fail(cudaErrorStreamCaptureUnsupported) : null_gpu_add(WAITS);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return null_gpu_add(WAITS); }
cudaError_t cudaDeviceSynchronize(void) { return capturing ? fail(cudaErrorStreamCaptureUnsupported) : null_gpu_add(WAITS); }

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) { return function(data), cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
  return function(stream, cudaSuccess, data), cudaSuccess;
}

/* ---------------------------------------------------------------- kernels */

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
  if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535) return fail(cudaErrorInvalidConfiguration);
  if ((uint64_t)block.x * block.y * block.z > 1024 || !block.x) return fail(cudaErrorInvalidConfiguration);
  return null_gpu_add(LAUNCHES);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **args) {
  return cudaLaunchKernel(kernel, config->gridDim, config->blockDim, args, config->dynamicSmemBytes, config->stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}
/* Not 0: the caller does not launch, so the launch is counted here. */
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  return cudaLaunchKernel(NULL, grid, block, NULL, shared, stream), 1;
}
void **__cudaRegisterFatBinary(void *binary) {
  static void *registered[4];
  return registered;
}
char __cudaInitModule(void **binary) { return 1; }
cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *function) { return *out = (cudaKernel_t)function, cudaSuccess; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->binaryVersion = out->ptxVersion = capability();
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *function, int threads, size_t shared) {
  return *out = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *out, const void *function, int threads, size_t shared, unsigned flags) {
  return *out = 2, cudaSuccess;
}

/* Of the driver, for Triton and Inductor, which launch by null_libraries.c. */
CUresult cuModuleLoad(CUmodule *out, const char *file) { return *out = null_gpu_handle(), CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *out, const void *image) { return *out = null_gpu_handle(), CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned n, CUjit_option *options, void **values) {
  return *out = null_gpu_handle(), CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) { return *out = null_gpu_handle(), CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *out, CUfunction_attribute which, CUfunction function) {
  return *out = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *out, CUfunction function, const CUlaunchConfig *config) { return *out = 8, CUDA_SUCCESS; }

static int nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **out, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
  void *known = dlsym(RTLD_DEFAULT, name);
  if (found) *found = cudaDriverEntryPointSuccess;
  return *out = known ? known : (void *)nothing, cudaSuccess;
}
