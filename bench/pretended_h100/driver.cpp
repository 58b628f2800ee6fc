// A CUDA driver, runtime, cuBLAS and the Cholesky part of cuSOLVER that answer as one H100 (sm_90a, 132 SMs, 80 GB) and
// compute nothing. bench/h100.py preloads it as libcuda.so.1: torch, Inductor, Triton, ptxas and the caching allocator
// are the real ones, so graphs, kernels, launches, shapes and memory are those of a GPU. Numbers are zero, times unknown.
//
// What is asked of the device goes to the file PRETENDED_H100_LOG, one line each, fields separated by tabs:
//   triton NAME REGISTERS SPILLED_BYTES | library NAME GRID BLOCK | product M N K BATCH TYPES | copy KIND BYTES |
//   fill BYTES | cholesky N BATCH | note TEXT (from Python, by pretended_note)
// Functions that are not here become stubs that return 0 (success); PRETENDED_H100_VERBOSE=1 names those that are called.

#include <dlfcn.h>
#include <driver_types.h>
#include <elf.h>
#include <sys/mman.h>
#include <vector_types.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

#if CUDART_VERSION >= 13000  // given to the compiler: 12080 for torch 2.9.1, 13020 for torch 2.15
#define CUDA13
#endif

namespace {

const char kName[] = "NVIDIA H100 80GB HBM3";
const size_t kMemory = 85'029'158'912;
const size_t kReserved = 600 << 20;  // what a context takes of it
const size_t kSmall = 65'536;  // copies up to this size are made on the device too: indices and counters stay valid

// Made on first use and never destroyed: torch calls this library before and after its own static objects live.
struct State {
  std::recursive_mutex lock;
  FILE* log = nullptr;
  bool logging = true;
  std::map<uintptr_t, size_t> device, pinned;  // allocations by address
  size_t allocated = 0;
  std::unordered_map<const void*, const char*> kernels;  // names of the libraries' kernels by host function

  State() {
    const char* path = getenv("PRETENDED_H100_LOG");
    if (path) log = fopen(path, "a");
  }
};

State& state() {
  static State* made = new State;
  return *made;
}

using Guard = std::lock_guard<std::recursive_mutex>;

void record(const char* format, ...) {
  State& s = state();
  Guard guard(s.lock);
  if (!s.log || !s.logging) return;
  va_list arguments;
  va_start(arguments, format);
  vfprintf(s.log, format, arguments);
  va_end(arguments);
  fputc('\n', s.log);
}

bool holds(const std::map<uintptr_t, size_t>& allocations, const void* pointer) {
  Guard guard(state().lock);
  auto next = allocations.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (next == allocations.begin()) return false;
  --next;
  return reinterpret_cast<uintptr_t>(pointer) < next->first + next->second;
}

// The numbers of cudaDeviceAttr and CUdevice_attribute are the same.
int attribute(int which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49'152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232'448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233'472;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65'536;
    case cudaDevAttrWarpSize: case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrClockRate: return 1'980'000;
    case cudaDevAttrMemoryClockRate: return 2'619'000;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 52'428'800;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch: case cudaDevAttrStreamPrioritiesSupported:
      return 1;
    default: return 0;
  }
}

int move(void* to, const void* from, size_t bytes) {
  State& s = state();
  bool to_device = holds(s.device, to), from_device = holds(s.device, from);
  record("copy\t%c2%c\t%zu", from_device ? 'd' : 'h', to_device ? 'd' : 'h', bytes);
  // Large copies on the device would only touch pages that are zero anyway.
  if (bytes <= kSmall || !to_device || !from_device) memmove(to, from, bytes);
  return 0;
}

const char* name_of(const void* function) {
  Guard guard(state().lock);
  auto found = state().kernels.find(function);
  return found == state().kernels.end() ? "?" : found->second;
}

void library_launch(const void* function, dim3 grid, dim3 block) {
  record("library\t%s\t%llu\t%u", name_of(function), 1ull * grid.x * grid.y * grid.z, block.x * block.y * block.z);
}

// A kernel of a cubin: what ptxas wrote into it about registers and spilled bytes.
struct Kernel {
  std::string name;
  int registers = 0, spilled = 0;
};

Kernel* kernel_of(const char* image, const char* name) {
  const int kFrameSize = 0x11, kRegisters = 0x2f, kSized = 4;  // attributes and format in the section .nv.info
  auto* made = new Kernel{name};
  auto* header = reinterpret_cast<const Elf64_Ehdr*>(image);
  auto* sections = reinterpret_cast<const Elf64_Shdr*>(image + header->e_shoff);
  const char* names = image + sections[header->e_shstrndx].sh_offset;
  const Elf64_Shdr *symbols = nullptr, *info = nullptr;
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type == SHT_SYMTAB) symbols = &sections[i];
    if (!strcmp(names + sections[i].sh_name, ".nv.info")) info = &sections[i];
  }
  if (!symbols || !info) return made;
  const char* strings = image + sections[symbols->sh_link].sh_offset;
  auto* table = reinterpret_cast<const Elf64_Sym*>(image + symbols->sh_offset);
  auto* at = reinterpret_cast<const unsigned char*>(image + info->sh_offset);
  for (auto* end = at + info->sh_size; at + 4 <= end;) {
    int format = at[0], kind = at[1], bytes = at[2] | at[3] << 8;
    at += 4;
    if (format != kSized) continue;  // other formats have no payload
    uint32_t fields[2] = {0, 0};
    memcpy(fields, at, bytes < 8 ? bytes : 8);
    at += bytes;
    if (bytes < 8 || strcmp(strings + table[fields[0]].st_name, name)) continue;
    if (kind == kFrameSize) made->spilled = fields[1];
    if (kind == kRegisters) made->registers = fields[1];
  }
  return made;
}

int triton_launch(void* function) {
  auto* kernel = static_cast<Kernel*>(function);
  record("triton\t%s\t%d\t%d", kernel->name.c_str(), kernel->registers, kernel->spilled);
  return 0;
}

template <class T>
int make(T** handle) {
  *handle = static_cast<T*>(calloc(1, 256));
  return 0;
}

int product(long m, long n, long k, long batch, int a, int b, int c) {
  record("product\t%ld\t%ld\t%ld\t%ld\t%d,%d,%d", m, n, k, batch, a, b, c);
  return 0;
}

}  // namespace

// ---- For Python: notes in the log, and whether anything is logged
EXPORT void pretended_note(const char* text) { record("note\t%s", text); }
EXPORT void pretended_logging(int on) {
  Guard guard(state().lock);
  state().logging = on;
  if (state().log) fflush(state().log);
}

// ---- Device
EXPORT int cudaGetDeviceCount(int* count) { *count = 1; return 0; }
EXPORT int cudaGetDevice(int* device) { *device = 0; return 0; }
EXPORT int cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return 0; }
EXPORT int cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return 0; }
EXPORT const char* cudaGetErrorString(int error) { return error == 2 ? "out of memory" : "no error"; }
EXPORT const char* cudaGetErrorName(int error) { return error == 2 ? "cudaErrorMemoryAllocation" : "cudaSuccess"; }
EXPORT int cudaDeviceGetAttribute(int* value, int which, int) { *value = attribute(which); return 0; }
EXPORT int cudaDeviceGetPCIBusId(char* text, int size, int) { snprintf(text, size, "0000:00:00.0"); return 0; }
EXPORT int cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return 0; }
EXPORT int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return 0;
}
EXPORT int cudaMemGetInfo(size_t* free, size_t* total) {
  *total = kMemory;
  *free = kMemory - kReserved - state().allocated;
  return 0;
}
#ifdef CUDA13
EXPORT int cudaGetDeviceProperties(cudaDeviceProp* p, int) {
#else
EXPORT int cudaGetDeviceProperties_v2(cudaDeviceProp* p, int) {
#endif
  memset(p, 0, sizeof *p);
  strcpy(p->name, kName);
  p->totalGlobalMem = kMemory;
  p->major = 9;
  p->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  p->regsPerBlock = p->regsPerMultiprocessor = 65'536;
  p->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  p->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  p->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  int threads[3] = {1024, 1024, 64}, blocks[3] = {2147483647, 65535, 65535};
  memcpy(p->maxThreadsDim, threads, sizeof threads);
  memcpy(p->maxGridSize, blocks, sizeof blocks);
  p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = p->managedMemory = p->cooperativeLaunch = 1;
  return 0;
}

// ---- Memory: pages of zeros that the system maps when they are touched
EXPORT int cudaMalloc(void** pointer, size_t bytes) {
  State& s = state();
  Guard guard(s.lock);
  const int out_of_memory = 2;
  if (s.allocated + bytes > kMemory - kReserved) return out_of_memory;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (made == MAP_FAILED) return out_of_memory;
  madvise(made, bytes, MADV_NOHUGEPAGE);
  s.device[reinterpret_cast<uintptr_t>(made)] = bytes;
  s.allocated += bytes;
  *pointer = made;
  return 0;
}
EXPORT int cudaFree(void* pointer) {
  State& s = state();
  Guard guard(s.lock);
  auto found = s.device.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == s.device.end()) return 0;
  munmap(pointer, found->second);
  s.allocated -= found->second;
  s.device.erase(found);
  return 0;
}
EXPORT int cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (posix_memalign(pointer, 4096, bytes)) return 2;
  Guard guard(state().lock);
  state().pinned[reinterpret_cast<uintptr_t>(*pointer)] = bytes;
  return 0;
}
EXPORT int cudaFreeHost(void* pointer) {
  Guard guard(state().lock);
  state().pinned.erase(reinterpret_cast<uintptr_t>(pointer));
  free(pointer);
  return 0;
}
EXPORT int cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  memset(found, 0, sizeof *found);
  bool device = holds(state().device, pointer), pinned = holds(state().pinned, pointer);
  found->type = device ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  if (device || pinned) found->devicePointer = const_cast<void*>(pointer);
  if (pinned) found->hostPointer = const_cast<void*>(pointer);
  return 0;
}
EXPORT int cudaMemcpy(void* to, const void* from, size_t bytes, int) { return move(to, from, bytes); }
EXPORT int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void*) { return move(to, from, bytes); }
EXPORT int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, void*) {
  return move(to, from, bytes);
}
EXPORT int cudaMemsetAsync(void* pointer, int value, size_t bytes, void*) {
  record("fill\t%zu", bytes);
  if (bytes <= kSmall) memset(pointer, value, bytes);
  return 0;
}
EXPORT int cudaMemset(void* pointer, int value, size_t bytes) { return cudaMemsetAsync(pointer, value, bytes, nullptr); }

// ---- Streams and events: all work is done at once
EXPORT int cudaStreamCreate(void** stream) { return make(stream); }
EXPORT int cudaStreamCreateWithFlags(void** stream, unsigned) { return make(stream); }
EXPORT int cudaStreamCreateWithPriority(void** stream, unsigned, int) { return make(stream); }
EXPORT int cudaStreamGetPriority(void*, int* priority) { *priority = 0; return 0; }
EXPORT int cudaStreamIsCapturing(void*, int* status) { *status = 0; return 0; }
EXPORT int cudaStreamGetCaptureInfo_v2(void*, int* status, void*, void*, void*, void*) { *status = 0; return 0; }
EXPORT int cudaStreamGetCaptureInfo(void*, int* status, void*, void*, void*, void*, void*) { *status = 0; return 0; }
EXPORT int cudaEventCreate(void** event) { return make(event); }
EXPORT int cudaEventCreateWithFlags(void** event, unsigned) { return make(event); }
EXPORT int cudaEventElapsedTime(float* milliseconds, void*, void*) { *milliseconds = 1; return 0; }

// ---- Kernels of torch's libraries: registered when a library loads, launched through the runtime
struct Launch {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local std::vector<Launch>* launches = nullptr;

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                   int*) {
  Guard guard(state().lock);
  state().kernels[host] = name;
}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  if (!launches) launches = new std::vector<Launch>;
  launches->push_back({grid, block, shared, stream});
  return 0;
}
EXPORT int __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Launch last = launches->back();
  launches->pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return 0;
}
EXPORT int cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t, void*) {
  library_launch(function, grid, block);
  return 0;
}
EXPORT int cudaLaunchKernelExC(const cudaLaunchConfig_t* launch, const void* function, void**) {
  library_launch(function, launch->gridDim, launch->blockDim);
  return 0;
}
EXPORT int cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->ptxVersion = found->binaryVersion = 90;
  found->maxDynamicSharedSizeBytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return 0;
}
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return 0;
}
static int succeed() { return 0; }
EXPORT int cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long, int* status) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = reinterpret_cast<void*>(succeed);
  if (status) *status = 0;
  return 0;
}
EXPORT int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long flags,
                                            int* status) {
  return cudaGetDriverEntryPoint(name, function, flags, status);
}
#ifdef CUDA13
EXPORT int __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return 0;
}
EXPORT int __cudaLaunchKernel(void* kernel, dim3 grid, dim3 block, void**, size_t, void*) {
  library_launch(kernel, grid, block);
  return 0;
}
#endif

// ---- Driver: what Triton and torch ask
EXPORT int cuDriverGetVersion(int* version) { *version = CUDART_VERSION; return 0; }
EXPORT int cuDeviceGet(int* device, int) { *device = 0; return 0; }
EXPORT int cuDeviceGetCount(int* count) { *count = 1; return 0; }
EXPORT int cuDeviceGetName(char* text, int size, int) { snprintf(text, size, "%s", kName); return 0; }
EXPORT int cuDeviceGetAttribute(int* value, int which, int) { *value = attribute(which); return 0; }
static int context;
EXPORT int cuCtxGetCurrent(void** current) { *current = &context; return 0; }
EXPORT int cuCtxGetDevice(int* device) { *device = 0; return 0; }
EXPORT int cuDevicePrimaryCtxRetain(void** retained, int) { *retained = &context; return 0; }
EXPORT int cuStreamIsCapturing(void*, int* status) { *status = 0; return 0; }  // Triton 3.9 asks
EXPORT int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
EXPORT int cuGetErrorString(int, const char** text) { *text = "no error"; return 0; }
EXPORT int cuGetErrorName(int, const char** text) { *text = "CUDA_SUCCESS"; return 0; }
EXPORT int cuPointerGetAttribute(void* value, int, unsigned long long pointer) {
  *static_cast<unsigned long long*>(value) = pointer;
  return 0;
}
EXPORT int cuModuleLoadData(void** module, const void* image) { *module = const_cast<void*>(image); return 0; }
EXPORT int cuModuleLoadDataEx(void** module, const void* image, unsigned, void*, void*) {
  *module = const_cast<void*>(image);
  return 0;
}
EXPORT int cuModuleLoad(void** module, const char* path) {
  FILE* file = fopen(path, "rb");
  const int not_found = 301;
  if (!file) return not_found;
  auto* image = new std::string;
  char part[65'536];
  while (size_t bytes = fread(part, 1, sizeof part, file)) image->append(part, bytes);
  fclose(file);
  *module = image->data();
  return 0;
}
EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = kernel_of(static_cast<const char*>(module), name);
  return 0;
}
EXPORT int cuFuncGetAttribute(int* value, int which, void* function) {
  const int kMaxThreads = 0, kLocalBytes = 3, kRegisters = 4;
  auto* kernel = static_cast<Kernel*>(function);
  *value = 0;
  if (which == kMaxThreads) *value = kernel->registers > 128 ? 512 : 1024;
  if (which == kLocalBytes) *value = kernel->spilled;
  if (which == kRegisters) *value = kernel->registers;
  return 0;
}
EXPORT int cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                          void**, void**) {
  return triton_launch(function);
}
EXPORT int cuLaunchKernelEx(const void*, void* function, void**, void**) { return triton_launch(function); }

// ---- cuBLAS: column-major products (m, k) x (k, n); types are cudaDataType numbers
EXPORT int cublasCreate_v2(void** handle) { return make(handle); }
EXPORT int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
EXPORT int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
EXPORT size_t cublasLtGetVersion() { return CUDART_VERSION >= 13000 ? 130'004 : 120'804; }
EXPORT int cublasSgemm_v2(void*, int, int, int m, int n, int k, const float*, const void*, int, const void*, int,
                          const float*, void*, int) {
  return product(m, n, k, 1, 0, 0, 0);
}
EXPORT int cublasGemmEx(void*, int, int, int m, int n, int k, const void*, const void*, int a, int, const void*, int b,
                        int, const void*, void*, int c, int, int, int) {
  return product(m, n, k, 1, a, b, c);
}
EXPORT int cublasGemmStridedBatchedEx(void*, int, int, int m, int n, int k, const void*, const void*, int a, int,
                                      long long, const void*, int b, int, long long, const void*, void*, int c, int,
                                      long long, int batch, int, int) {
  return product(m, n, k, batch, a, b, c);
}
struct Layout {
  int type;
  uint64_t rows, columns;
};
EXPORT int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t) {
  *layout = new Layout{type, rows, columns};
  return 0;
}
EXPORT int cublasLtMatrixLayoutDestroy(Layout* layout) { delete layout; return 0; }
EXPORT int cublasLtMatmulDescCreate(void** description, int, int) { return make(description); }
EXPORT int cublasLtMatmulDescDestroy(void* description) { free(description); return 0; }
EXPORT int cublasLtMatmulPreferenceCreate(void** preference) { return make(preference); }
EXPORT int cublasLtMatmulPreferenceDestroy(void* preference) { free(preference); return 0; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* result,
                                          int* found) {
  memset(result, 0, 96);
  *found = 1;
  return 0;
}
EXPORT int cublasLtMatmul(void*, void*, const void*, const void*, Layout* a, const void*, Layout* b, const void*,
                          const void*, Layout*, void*, Layout* d, const void*, void*, size_t, void*) {
  uint64_t inner = a->rows == d->rows ? a->columns : a->rows;
  return product(d->rows, d->columns, inner, 1, a->type, b->type, d->type);
}

// ---- cuSOLVER: Cholesky factors, for GPTQ
static int cholesky(long n, long batch) { record("cholesky\t%ld\t%ld", n, batch); return 0; }
EXPORT int cusolverDnCreate(void** handle) { return make(handle); }
EXPORT int cusolverDnDestroy(void* handle) { free(handle); return 0; }
EXPORT int cusolverDnCreateParams(void** parameters) { return make(parameters); }
EXPORT int cusolverDnDestroyParams(void* parameters) { free(parameters); return 0; }
EXPORT int cusolverDnXpotrf_bufferSize(void*, void*, int, int64_t, int, const void*, int64_t, int, size_t* device,
                                       size_t* host) {
  *device = *host = 1024;
  return 0;
}
EXPORT int cusolverDnXpotrf(void*, void*, int, int64_t n, int, void*, int64_t, int, void*, size_t, void*, size_t,
                            int*) {
  return cholesky(n, 1);
}
EXPORT int cusolverDnXpotrs(void*, void*, int, int64_t n, int64_t, int, const void*, int64_t, int, void*, int64_t,
                            int*) {
  return cholesky(n, 1);
}
EXPORT int cusolverDnDpotrfBatched(void*, int, int n, double**, int, int*, int batch) { return cholesky(n, batch); }
EXPORT int cusolverDnDpotrsBatched(void*, int, int n, int, double**, int, double**, int, int*, int batch) {
  return cholesky(n, batch);
}
EXPORT int cusolverDnDpotrf_bufferSize(void*, int, int, double*, int, int* size) { *size = 1024; return 0; }
EXPORT int cusolverDnDpotrf(void*, int, int n, double*, int, double*, int, int*) { return cholesky(n, 1); }
