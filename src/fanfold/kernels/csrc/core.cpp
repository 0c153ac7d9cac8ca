// Choice of the instruction set, and one call.
#include "core.h"

#if defined(FANFOLD_AVX512) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "fit.h"
#include "packed.h"
#include "workspace.h"

namespace fanfold {

extern const Kernels kKernelsScalar;
extern const PackedKernels kPackedScalar;
extern const FitKernels kFitScalar;
#ifdef FANFOLD_X86
extern const Kernels kKernelsAvx2;
extern const PackedKernels kPackedAvx2, kPackedAvxVnni;
extern const FitKernels kFitAvx2;
#endif
#ifdef FANFOLD_AVX512
extern const Kernels kKernelsAvx512;
extern const PackedKernels kPackedAvx512, kPackedAvx512Vnni, kPackedAvx512Bf16, kPackedAmx;
extern const FitKernels kFitAvx512;
#endif

namespace {

bool always() { return true; }
#ifdef FANFOLD_X86
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
#endif
#ifdef FANFOLD_AVX512
// The system keeps tile registers across context switches only for processes that have asked for them.
bool tiles_granted() {
#ifdef __linux__
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#ifdef FANFOLD_EMULATED  // for tests, see CMakeLists.txt
bool has_avx512() { return has_avx2(); }
bool has_avx512_vnni() { return has_avx512(); }
bool has_avx512_bf16() { return has_avx512_vnni(); }
#else
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
#endif
// Intel's cores multiply bfloat16 pairs no faster than float32 numbers (half as many operations a second on a Xeon of
// 2023, measured), AMD's twice as fast.
bool has_slow_avx512_bf16() { return has_avx512_bf16() && __builtin_cpu_is("intel"); }
bool has_fast_avx512_bf16() { return has_avx512_bf16() && !__builtin_cpu_is("intel"); }
bool has_amx() {
  static const bool granted = has_avx512_bf16() && __builtin_cpu_supports("amx-tile") &&
                              __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
                              tiles_granted();
  return granted;
}
#endif

struct Entry {
  Isa isa;
  bool (*supported)();
};

// Best last.
const Entry kIsas[] = {
    {{"scalar", &kKernelsScalar, &kPackedScalar, &kFitScalar}, always},
#ifdef FANFOLD_X86
    {{"avx2", &kKernelsAvx2, &kPackedAvx2, &kFitAvx2}, has_avx2},
    {{"avxvnni", &kKernelsAvx2, &kPackedAvxVnni, &kFitAvx2}, has_avx_vnni},
#endif
#ifdef FANFOLD_AVX512
    {{"avx512", &kKernelsAvx512, &kPackedAvx512, &kFitAvx512}, has_avx512},
    {{"avx512bf16", &kKernelsAvx512, &kPackedAvx512Bf16, &kFitAvx512}, has_slow_avx512_bf16},
    {{"avx512vnni", &kKernelsAvx512, &kPackedAvx512Vnni, &kFitAvx512}, has_avx512_vnni},
    {{"avx512bf16", &kKernelsAvx512, &kPackedAvx512Bf16, &kFitAvx512}, has_fast_avx512_bf16},
    {{"amx", &kKernelsAvx512, &kPackedAmx, &kFitAvx512}, has_amx},
#endif
};

}  // namespace

int isa_count() { return static_cast<int>(sizeof kIsas / sizeof kIsas[0]); }

const Isa* isa(int index) {
#ifdef FANFOLD_X86
  __builtin_cpu_init();
#endif
  if (index < 0 || index >= isa_count() || !kIsas[index].supported()) return nullptr;
  return &kIsas[index].isa;
}

const char* const* activation_names() {
  static const char* const names[kActCount] = {"relu", "relu2",   "gelu_erf",   "gelu_tanh", "gelu_sigmoid",
                                               "silu", "sigmoid", "tanh",       "identity",  "softplus",
                                               "elu",  "mish",    "leaky_relu", "xielu"};
  return names;
}

void run(const Kernels& isa, const Call& given) {
  if (given.tokens <= 0) return;
  Call call = given;
  const ptrdiff_t inputs = call.d_model * ((call.gate.data != nullptr) + (call.up.data != nullptr)) + call.d_out;
  const double weights = static_cast<double>(inputs) * static_cast<double>(call.d_ff);
  call.threads = threads_worth(call.threads, weights, call.tokens);
  const Lease lease(isa.workspace(call) * sizeof(float));
  isa.run(call, static_cast<float*>(lease.data()));
}

void run(const Kernels& isa, const Norm& given) {
  if (given.tokens <= 0 || given.width <= 0) return;
  Norm call = given;
  call.threads = threads_worth(call.threads, static_cast<double>(call.width), call.tokens);
  isa.norm(call);
}

}  // namespace fanfold
