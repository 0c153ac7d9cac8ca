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

// A search for scales, and what it finds.
struct FitResult {
  Buffer codes, scale, minimum;

  bool same(const FitResult& other) const {
    return memcmp(codes.data(), other.codes.data(), codes.size()) == 0 &&
           memcmp(scale.data(), other.scale.data(), scale.size()) == 0 &&
           memcmp(minimum.data(), other.minimum.data(), minimum.size()) == 0;
  }
};

struct FitCase {
  Buffer w, weight;
  fanfold::Fit call;

  FitResult run(const fanfold::FitKernels& kernels, int threads) {
    const size_t groups = static_cast<size_t>((call.k + call.group - 1) / call.group * call.n);
    FitResult r{Buffer(static_cast<size_t>(call.n * call.k), 1), Buffer(groups * (call.half ? 2 : 4), 4),
                Buffer(groups * (call.half ? 2 : 4), 4)};
    r.minimum.fill(0);
    call.threads = threads;
    call.codes = r.codes.data();
    call.scale = r.scale.data();
    call.minimum = call.is_signed ? nullptr : r.minimum.data();
    fanfold::fit(kernels, call);
    return r;
  }
};

inline FitCase fit_case(ptrdiff_t n, ptrdiff_t k, ptrdiff_t group, bool minimum, ptrdiff_t gap) {
  static constexpr float kSteps[] = {-8.4f, 7.2f};
  FitCase f{numbers(n, k, k + gap, fanfold::kFloat32), numbers(1, k, k, fanfold::kFloat32), {}};
  for (ptrdiff_t i = 0; i < k; ++i) f.weight.as<float>()[i] = std::fabs(f.weight.as<float>()[i]);
  fanfold::Fit& c = f.call;
  c.w = f.w.as<float>();
  c.stride = k + gap;
  c.n = n;
  c.k = k;
  c.group = group;
  c.weight = f.weight.as<float>();
  c.low = minimum ? 0.0f : -8.0f;
  c.high = minimum ? 15.0f : 7.0f;
  c.offset = minimum ? 0 : 8;
  c.is_signed = !minimum;
  c.half = group != k;
  c.plain = minimum ? 15.0f : -8.0f;
  c.steps = kSteps;
  c.n_steps = 2;
  c.again = 2;
  return f;
}
