// Calls of the kernels with their matrices, for the drivers.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "matrices.h"

extern "C" void __sanitizer_set_death_callback(void (*callback)());

// The case at work, for the report of a failure.
inline char current_case[256] = "none";
inline void name_cases() {
  __sanitizer_set_death_callback([] { fprintf(stderr, "case: %s\n", current_case); });
}
[[noreturn]] inline void wrong(const char* what) {
  fprintf(stderr, "%s\ncase: %s\n", what, current_case);
  exit(1);
}

enum Kind { kLinear, kPlainFfn, kGatedFfn, kKinds };

// What a case is made of; d_model is a linear layer's k, d_ff its n.
struct Shape {
  ptrdiff_t d_model, d_ff;
};

// One of the formats with one of the activations' types.
struct Mode {
  int format;
  bool int8_activations;
};
inline constexpr int kModes = 2 * fanfold::kFormatCount - fanfold::kInt8;
inline Mode mode(int i) {
  return i < fanfold::kFormatCount ? Mode{i, false} : Mode{i - fanfold::kFormatCount + fanfold::kInt8, true};
}

struct PackedLayer {
  PackedData gate, up, down;
  fanfold::PackedCall call;
};

inline PackedLayer packed_layer(Kind kind, Mode mode, Shape s, bool bias, size_t missing = 0) {
  PackedLayer l;
  const auto made = [&](ptrdiff_t n, ptrdiff_t k) {
    return packed_data(mode.format, n, k, mode.int8_activations, bias, missing);
  };
  l.down = kind == kLinear ? made(s.d_ff, s.d_model) : made(s.d_model, s.d_ff);
  if (kind != kLinear) l.up = made(s.d_ff, s.d_model);
  if (kind == kGatedFfn) l.gate = made(s.d_ff, s.d_model);
  l.call.gate = l.gate.matrix;
  l.call.up = l.up.matrix;
  l.call.down = l.down.matrix;
  return l;
}

struct PlainLayer {
  Buffer gate, up, down, gate_bias, up_bias, down_bias;
  fanfold::Call call;
};

// Matrices read in place: row-major or transposed, rows `gap` elements apart.
inline PlainLayer plain_layer(Kind kind, DType w, bool transposed, Shape s, ptrdiff_t gap, bool bias) {
  PlainLayer l;
  const auto made = [&](ptrdiff_t n, ptrdiff_t k, Buffer* data, Buffer* b) {
    const ptrdiff_t rows = transposed ? k : n, width = transposed ? n : k;
    *data = numbers(rows, width, width + gap, w);
    if (bias) *b = numbers(1, n, n, w);
    return fanfold::Matrix{data->data(), width + gap, transposed, bias ? b->data() : nullptr};
  };
  fanfold::Call& c = l.call;
  c.w_dtype = w;
  c.d_model = kind == kLinear ? 0 : s.d_model;
  c.d_ff = kind == kLinear ? s.d_model : s.d_ff;  // inputs of down
  c.d_out = kind == kLinear ? s.d_ff : s.d_model;
  c.down = made(c.d_out, c.d_ff, &l.down, &l.down_bias);
  if (kind != kLinear) c.up = made(s.d_ff, s.d_model, &l.up, &l.up_bias);
  if (kind == kGatedFfn) c.gate = made(s.d_ff, s.d_model, &l.gate, &l.gate_bias);
  return l;
}

inline ptrdiff_t outputs(const fanfold::PackedCall& c) { return c.down.n; }
inline ptrdiff_t inputs(const fanfold::PackedCall& c) { return c.up.columns != nullptr ? c.up.k : c.down.k; }
inline ptrdiff_t outputs(const fanfold::Call& c) { return c.d_out; }
inline ptrdiff_t inputs(const fanfold::Call& c) { return c.up.data != nullptr ? c.d_model : c.d_ff; }

// The activation, by number, with or without the clamps.
template <class AnyCall>
void set_activation(AnyCall* c, int act, bool clamped) {
  c->act = act % fanfold::kActCount;
  for (double& p : c->params) p = 0.5;
  c->gate_limit = c->up_limit = clamped ? 0.75f : INFINITY;
  c->up_offset = clamped ? 1.0f : 0.0f;
}

template <class AnyCall>
void set_tokens(AnyCall* c, const Buffer& x, DType type, ptrdiff_t tokens, ptrdiff_t gap) {
  c->x = x.data();
  c->x_dtype = c->y_dtype = type;
  c->tokens = tokens;
  c->x_stride = inputs(*c) + gap;
  c->y_stride = outputs(*c) + gap;
}

inline void go(const fanfold::PackedKernels& k, const fanfold::PackedCall& c, uint8_t* workspace) {
  k.run(c, workspace);
}
inline void go(const fanfold::Kernels& k, const fanfold::Call& c, uint8_t* workspace) {
  k.run(c, reinterpret_cast<float*>(workspace));
}
inline size_t workspace_bytes(const fanfold::PackedKernels& k, const fanfold::PackedCall& c) { return k.workspace(c); }
inline size_t workspace_bytes(const fanfold::Kernels& k, const fanfold::Call& c) {
  return k.workspace(c) * sizeof(float);
}

// The call with a workspace of its own, exact and full of `garbage`: `run` would take a larger one from its cache.
template <class AnyKernels, class AnyCall>
Output output_of(const AnyKernels& kernels, AnyCall c, int threads, int garbage) {
  Output y(c.tokens, outputs(c), c.y_stride, c.y_dtype);
  c.y = y.buffer.data();
  c.threads = threads;
  Buffer workspace(workspace_bytes(kernels, c));
  workspace.fill(garbage);
  go(kernels, c, workspace.data());
  return y;
}
