/* cuBLAS, NCCL, NVML and the launches of the driver, for null_gpu.c: products and kernels are counted, collectives return at once.
 *
 * Without their headers: most parameters are unused and left out, as the calling convention allows.
 */
#include <stddef.h>
#include <string.h>

enum { LAUNCHES, COLLECTIVES = 4 }; /* as in null_gpu.c */
int null_gpu_add(int which);
void *null_gpu_handle(void);

#define LAUNCH(name) int name(void) { return null_gpu_add(LAUNCHES); }
#define COLLECTIVE(name) int name(void) { return null_gpu_add(COLLECTIVES); }
#define CREATE(name) int name(void **out) { return *out = null_gpu_handle(), 0; }

LAUNCH(cuLaunchKernel)
LAUNCH(cuLaunchKernelEx)
LAUNCH(cuLaunchCooperativeKernel)

LAUNCH(cublasGemmEx)
LAUNCH(cublasGemmStridedBatchedEx)
LAUNCH(cublasSgemmEx)
LAUNCH(cublasSgemm_v2)
LAUNCH(cublasSgemmStridedBatched)
LAUNCH(cublasDgemm_v2)
LAUNCH(cublasDgemmStridedBatched)
LAUNCH(cublasLtMatmul)
CREATE(cublasCreate_v2)
CREATE(cublasLtMatmulDescCreate)
CREATE(cublasLtMatrixLayoutCreate)
CREATE(cublasLtMatmulPreferenceCreate)
size_t cublasLtGetVersion(void) { return 130101; }
int cublasGetMathMode(void *cublas, int *out) { return *out = 0; }
int cublasGetPointerMode_v2(void *cublas, int *out) { return *out = 0; }
int cublasLtMatmulAlgoGetHeuristic(
    void *cublas, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results, int *found) {
  memset(results, 0, 96); /* of one cublasLtMatmulHeuristicResult_t: no workspace, success */
  return *found = 1, 0;
}

COLLECTIVE(ncclAllReduce)
COLLECTIVE(ncclAllGather)
COLLECTIVE(ncclReduceScatter)
COLLECTIVE(ncclReduce)
COLLECTIVE(ncclBroadcast)
COLLECTIVE(ncclBcast)
COLLECTIVE(ncclAlltoAll)
COLLECTIVE(ncclSend)
COLLECTIVE(ncclRecv)
CREATE(ncclCommInitRank)
CREATE(ncclCommInitRankConfig)
CREATE(ncclCommInitRankScalable)
int ncclCommSplit(void *parent, int color, int key, void **out) { return *out = null_gpu_handle(), 0; }
int ncclGetVersion(int *out) { return *out = 22907, 0; }
int ncclGetUniqueId(char *out) { return memset(out, 7, 128), 0; }
int ncclCommGetAsyncError(void *communicator, int *out) { return *out = 0; }
const char *ncclGetErrorString(int error) { return "error of the null NCCL"; }
const char *ncclGetLastError(void *communicator) { return "none"; }

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **out) { return *out = null_gpu_handle(), 0; }
int nvmlDeviceGetGpuFabricInfoV(void) { return 0; } /* no fabric: the caller's zeros stay */
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 0; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 0; }
int nvmlDeviceGetComputeRunningProcesses(void) { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return *out = 13000, 0; }

size_t cudnnGetVersion(void) { return 90000; } /* too old for torch to prefer its attention, which it plans by asking a real driver */
