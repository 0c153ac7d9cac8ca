// The C++ core of the `cpu` backend: plain structs, pointers and sizes. Knows no Python and no torch.
//
// T tokens, K inputs of a matrix, N outputs of a matrix. All sizes and strides count elements, 64-bit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fanfold {

enum DType { kFloat32 = 0, kBFloat16 = 1 };

// In the order of fanfold.activations.ACTIVATIONS; activation_names() lists them for the check.
enum Act {
  kRelu,
  kRelu2,
  kGeluErf,
  kGeluTanh,
  kGeluSigmoid,
  kSilu,
  kSigmoid,
  kTanh,
  kIdentity,
  kSoftplus,
  kElu,
  kMish,
  kLeakyRelu,
  kXielu,
  kActCount
};

// An [N, K] matrix. Not transposed: row n starts at data + n * stride. Transposed (GPT-2's Conv1D): the memory is
// [K, N] and element (n, k) lies at data + k * stride + n. data == nullptr: absent.
struct Matrix {
  const void* data = nullptr;
  ptrdiff_t stride = 0;
  bool transposed = false;
  const void* bias = nullptr;  // [N], contiguous, or nullptr
};

// One FFN: y = down(act(min(gate x, gate_limit)) * (clip(up x, -up_limit, up_limit) + up_offset)), or with an absent
// gate y = down(act(up x)). With an absent up as well it is one linear layer: y = down(x), and d_model is unused.
struct Call {
  int threads = 1;
  const void* x = nullptr;
  DType x_dtype = kFloat32;
  ptrdiff_t x_stride = 0;
  void* y = nullptr;
  DType y_dtype = kFloat32;
  ptrdiff_t y_stride = 0;
  ptrdiff_t tokens = 0;
  ptrdiff_t d_model = 0;  // inputs of gate and up
  ptrdiff_t d_ff = 0;     // inputs of down
  ptrdiff_t d_out = 0;    // outputs of down
  Matrix gate, up, down;
  DType w_dtype = kFloat32;  // matrices and biases
  int act = kIdentity;
  double params[4] = {0, 0, 0, 0};  // the activation's own parameters, in the table's order
  float gate_limit = 0, up_limit = 0, up_offset = 0;
};

// [T, F] numbers of the call's dtype: row t starts at data + t * stride. data == nullptr: absent, or not wanted.
struct Rows {
  void* data = nullptr;
  ptrdiff_t stride = 0;
};

// The middle of an FFN in training. From pre-activations the coefficients m = act(gate) * up, or act(up) without a
// gate; from their gradient those of gate and up. With a mask what it drops is 0 and what it leaves is scaled by
// `kept_scale`. Any result may be written over any input.
struct Middle {
  int threads = 1;
  DType dtype = kFloat32;
  ptrdiff_t tokens = 0;
  ptrdiff_t d_ff = 0;
  Rows gate, up, grad;            // read; grad may be absent: then m alone is computed
  Rows to_gate, to_up, m;         // written
  const uint8_t* mask = nullptr;  // [T, F] of 0 and 1
  ptrdiff_t mask_stride = 0;
  float kept_scale = 1;
  int act = kIdentity;
  double params[4] = {0, 0, 0, 0};
  float gate_limit = 0, up_limit = 0, up_offset = 0;
};

// The norm before an FFN: y = x / sqrt(mean(x^2) + eps) * (weight + offset), row by row of [T, width].
struct Norm {
  int threads = 1;
  const void* x = nullptr;
  ptrdiff_t x_stride = 0;
  void* y = nullptr;
  ptrdiff_t y_stride = 0;
  ptrdiff_t tokens = 0;
  ptrdiff_t width = 0;
  DType dtype = kFloat32;  // of x, y and weight
  const void* weight = nullptr;
  float offset = 0;
  double eps = 0;
};

// What one instruction set offers; `workspace` says how many floats `run` needs.
struct Kernels {
  size_t (*workspace)(const Call&);
  void (*run)(const Call&, float* workspace);
  void (*activation)(int act, const double* params, const float* src, float* dst, ptrdiff_t n);
  void (*middle)(const Middle&);
  void (*norm)(const Norm&);
};

struct PackedKernels;  // packed.h
struct FitKernels;     // fit.h

struct Isa {
  const char* name;
  const Kernels* kernels;
  const PackedKernels* packed;
  const FitKernels* fit;
};

// Instruction sets of this build by number, 0 … isa_count() - 1, best last; nullptr where the CPU lacks one.
int isa_count();
const Isa* isa(int index);
const char* const* activation_names();

// Runs the call with a workspace from the cache. Throws std::bad_alloc when there is no memory for it.
void run(const Kernels& isa, const Call& call);
void run(const Kernels& isa, const Norm& call);

}  // namespace fanfold
