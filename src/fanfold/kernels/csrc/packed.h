// FFNs and linear layers on packed matrices: fanfold/kernels/packed.py documents the layout, this is its other side.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core.h"

namespace fanfold {

constexpr ptrdiff_t kLanes = 16;  // outputs of a column

// In the order of packed.py's _IDS.
enum Format {
  kFp32,
  kBf16,
  kFp16,
  kInt8,
  kInt8G32,
  kInt8G64,
  kInt8G128,
  kInt4G32,
  kInt4G64,
  kInt4G128,
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kFormatCount
};

// One packed [n, k] matrix. `packed_matrix` fills in what follows from the format.
struct Packed {
  const uint8_t* columns = nullptr;  // nullptr: absent
  const float* row_scale = nullptr;  // [n rounded up to 16], for kInt8
  const float* bias = nullptr;       // [n] or nullptr
  Format format = kFp32;
  ptrdiff_t n = 0, k = 0;
  int bits = 32;                  // of a code
  ptrdiff_t group = 0;            // inputs that share a scale; 0: none in the columns
  bool minimum = false;           // a minimum beside the scale
  int offset = 0;                 // taken off a code as stored
  ptrdiff_t block = 0;            // inputs of a whole block
  ptrdiff_t block_bytes = 0;      // of a whole block, header included
  ptrdiff_t column_bytes = 0;     // of 16 outputs
  bool int8_activations = false;  // inputs are quantized per token and `activation_group` inputs
  ptrdiff_t activation_group = 0;

  bool is_integer() const { return format >= kInt8; }
};

Packed packed_matrix(const void* data, int format, ptrdiff_t n, ptrdiff_t k, const float* bias, bool int8_activations);

// Bytes of the header (scales, minima) of a block of `inputs` inputs.
inline ptrdiff_t header_bytes(const Packed& m, ptrdiff_t inputs) {
  if (m.group == 0) return 0;
  const ptrdiff_t groups = (inputs + m.group - 1) / m.group;
  return (groups * (m.minimum ? 4 : 2) * kLanes + 63) / 64 * 64;
}

// A further product of the same inputs: its own matrix, its own outputs.
struct Beside {
  Packed matrix;
  void* y = nullptr;
  ptrdiff_t y_stride = 0;
};

// As Call, with packed matrices: y = down(act(gate x) * (up x)), or down(act(up x)), or down(x) without an up. In the
// last case x may meet further matrices in the same pass, of the same format, inputs and kind of activations.
struct PackedCall {
  static constexpr int kMostBeside = 3;

  int threads = 1;
  const void* x = nullptr;
  DType x_dtype = kFloat32;
  ptrdiff_t x_stride = 0;
  void* y = nullptr;
  DType y_dtype = kFloat32;
  ptrdiff_t y_stride = 0;
  ptrdiff_t tokens = 0;
  Packed gate, up, down;
  int n_beside = 0;
  Beside beside[kMostBeside];
  int act = kIdentity;
  double params[4] = {0, 0, 0, 0};
  float gate_limit = 0, up_limit = 0, up_offset = 0;
};

enum Arithmetic { kFloatArithmetic, kBf16Arithmetic, kInt8Arithmetic };

struct PackedKernels {
  size_t (*workspace)(const PackedCall&);              // bytes
  bool (*run)(const PackedCall&, uint8_t* workspace);  // false: an activation was not finite and could not be quantized
  double (*burn)(Arithmetic, ptrdiff_t rounds);        // see peak_inl.h
  Arithmetic (*products)(const Packed&, bool narrow_x, ptrdiff_t tokens);  // how a matrix meets x (bfloat16 if narrow)
};

void run(const PackedKernels& isa, const PackedCall& call);

// Whether one call may compute both products of `a` and `b`.
bool fit_together(const Packed& a, const Packed& b);

// Operations per second of `threads` threads together, measured for some 10 ms; 0 without a unit for them.
double peak(const PackedKernels& isa, Arithmetic kind, int threads);

}  // namespace fanfold
