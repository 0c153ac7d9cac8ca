// The search of fit.h for one instruction set. A tiny .cpp file for each defines FANFOLD_NS (namespace), FANFOLD_TABLE
// (the exported FitKernels) and FANFOLD_W (floats in a vector) and includes this file, compiled with its own flags and
// without contraction. Headers used here must bring no inline code.

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core.h"
#include "fit.h"
#include "parallel.h"

namespace fanfold {
namespace FANFOLD_NS {
namespace {

#include "vec_inl.h"

constexpr float kInfinity = __builtin_inff();

INL vf least_of(vf a, vf b) { return b < a ? b : a; }
INL vf largest_of(vf a, vf b) { return b > a ? b : a; }
INL vf size_of(vf a) { return (vf)((vu)a & 0x7fffffffu); }
INL vf with_sign(vf size, vf sign) { return (vf)((vu)size | ((vu)sign & 0x80000000u)); }
INL vi is_finite(vf a) { return size_of(a) < splat(kInfinity); }

// To the nearest integer, ties to even; |a| < 2^22.
INL vf nearest(vf a) { return (a + splat(12582912.0f)) - splat(12582912.0f); }

// To the nearest float16, ties to even, as a float32. What float16 cannot hold becomes infinite.
INL vf to_half(vf a) {
  const vf size = size_of(a);
  const vu bits = (vu)size;
  const vf normal = (vf)((bits + 0xfff + ((bits >> 13) & 1)) & 0xffffe000u);
  const vf subnormal = (size + splat(0.75f)) - splat(0.75f);  // from 0.5 to 1 floats are 2^-24 apart
  vf rounded = size < splat(0x1p-14f) ? subnormal : normal;
  rounded = rounded > splat(65504.0f) ? splat(kInfinity) : rounded;
  return with_sign(size != size ? size : rounded, a);
}

// A float that is a float16 already, as its bits.
INL uint16_t half_bits(float a) {
  uint32_t bits;
  __builtin_memcpy(&bits, &a, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size >= 0x47800000) return (uint16_t)(sign | 0x7c00);
  if (size >= 0x38800000) return (uint16_t)(sign | ((size - 0x38000000) >> 13));
  const float steps = (a < 0 ? -a : a) * 0x1p24f;
  return (uint16_t)(sign | (uint32_t)steps);
}

// W groups of the same inputs of W rows, a lane each.
struct Lanes {
  const Fit& call;
  const float* w;       // [inputs, W]
  const float* weight;  // [inputs]
  ptrdiff_t inputs;
  vf scale = {}, minimum = {}, error = {};  // the best so far

  vf code(vf w, vf scale, vf minimum) const {
    vf q = (w - minimum) / scale;  // a product with 1 / scale would overflow for subnormal scales
    q = q < splat(call.low) ? splat(call.low) : q;
    q = q > splat(call.high) ? splat(call.high) : q;
    return scale == vf{} ? vf{} : nearest(q);
  }
  vf stored(vf a) const { return call.half ? to_half(a) : a; }

  struct Judged {
    vf scale, minimum, error;
  };
  template <bool kMinimum>
  Judged judged(vf scale, vf minimum) const {
    vf rounded = stored(scale);
    const vf smallest = splat(call.half ? 0x1p-24f : 0x1p-149f);
    rounded = ((rounded == vf{}) & (scale != vf{})) ? with_sign(smallest, scale) : rounded;
    minimum = stored(minimum);
    vf error = {};
    for (ptrdiff_t i = 0; i < inputs; ++i) {
      const vf v = load(w + i * W);
      vf off = code(v, rounded, minimum) * rounded;
      if (kMinimum) off = off + minimum;
      off = off - v;
      error = error + off * off * splat(weight[i]);
    }
    return {rounded, minimum, error};
  }

  template <bool kMinimum>
  void begin(vf first_scale, vf first_minimum) {
    const Judged j = judged<kMinimum>(first_scale, first_minimum);
    scale = j.scale;
    minimum = j.minimum;
    // nothing is better than what cannot be stored: the caller refuses it
    error = (is_finite(scale) & is_finite(minimum)) ? j.error : splat(-1.0f);
  }

  template <bool kMinimum>
  void offer(vf new_scale, vf new_minimum) {
    const Judged j = judged<kMinimum>(new_scale, new_minimum);
    const vi better = j.error < error * splat(0.999f);
    scale = better ? j.scale : scale;
    minimum = better ? j.minimum : minimum;
    error = better ? j.error : error;
  }

  void refine_symmetric(vf from) {
    vf wq = {}, qq = {};
    for (ptrdiff_t i = 0; i < inputs; ++i) {
      const vf v = load(w + i * W), q = code(v, from, vf{}), u = splat(weight[i]);
      wq = wq + v * q * u;
      qq = qq + q * q * u;
    }
    const vf fitted = wq / qq;
    offer<false>(is_finite(fitted) ? fitted : from, vf{});
  }

  void refine_affine(vf from, vf low) {
    vf n = {}, s_q = {}, s_qq = {}, s_w = {}, s_wq = {};
    for (ptrdiff_t i = 0; i < inputs; ++i) {
      const vf v = load(w + i * W), q = code(v, from, low), u = splat(weight[i]);
      const vf shifted = v - low, uq = u * q;  // shifted: small numbers; a common offset would cancel badly
      n = n + u;
      s_q = s_q + uq;
      s_qq = s_qq + uq * q;
      s_w = s_w + u * shifted;
      s_wq = s_wq + uq * shifted;
    }
    vf fitted = (n * s_wq - s_q * s_w) / (n * s_qq - s_q * s_q);
    const vf least = stored(low + (s_w - fitted * s_q) / n);
    fitted = (s_wq - (least - low) * s_q) / s_qq;  // for the minimum as it is stored
    const vi good = is_finite(fitted) & is_finite(least);
    offer<true>(good ? fitted : from, good ? least : low);
  }

  void search_symmetric() {
    vf largest = {};
    for (ptrdiff_t i = 0; i < inputs; ++i) {
      const vf v = load(w + i * W);
      largest = size_of(v) > size_of(largest) ? v : largest;  // of equal ones the first
    }
    if (!call.is_signed) largest = size_of(largest);
    begin<false>(largest / splat(call.plain), vf{});
    for (ptrdiff_t i = 0; i < call.n_steps; ++i) refine_symmetric(largest / splat(call.steps[i]));
    for (int i = 0; i < call.again; ++i) refine_symmetric(scale);
  }

  void search_affine() {
    vf least = load(w), most = least;
    for (ptrdiff_t i = 1; i < inputs; ++i) {
      least = least_of(least, load(w + i * W));
      most = largest_of(most, load(w + i * W));
    }
    const vf span = most - least;
    begin<true>(span / splat(call.plain), least);
    for (ptrdiff_t i = 0; i < call.n_steps; ++i) {
      const vf from = span / splat(call.steps[i]);
      refine_affine(from, least + (span - splat(call.high) * from) / splat(2.0f));
    }
    for (int i = 0; i < call.again; ++i) refine_affine(scale, minimum);
  }
};

INL void put_stored(const Fit& c, void* to, ptrdiff_t at, float value) {
  if (c.half) {
    ((uint16_t*)to)[at] = half_bits(value);
  } else {
    ((float*)to)[at] = value;
  }
}

// Rows [row, row + rows), at most W of them; lanes without a row repeat the first.
static void fit_rows(const Fit& c, ptrdiff_t row, ptrdiff_t rows, float* part) {
  const ptrdiff_t groups = div_up(c.k, c.group);
  for (ptrdiff_t g = 0; g < groups; ++g) {
    const ptrdiff_t k0 = g * c.group, inputs = imin(c.group, c.k - k0);
    for (ptrdiff_t l = 0; l < W; ++l) {
      const float* const from = c.w + (row + (l < rows ? l : 0)) * c.stride + k0;
      for (ptrdiff_t i = 0; i < inputs; ++i) part[i * W + l] = from[i];
    }
    Lanes lanes{c, part, c.weight + k0, inputs};
    if (c.minimum != nullptr) {
      lanes.search_affine();
    } else {
      lanes.search_symmetric();
    }
    float scale[W], minimum[W];
    store(scale, lanes.scale);
    store(minimum, lanes.minimum);
    for (ptrdiff_t l = 0; l < rows; ++l) {
      put_stored(c, c.scale, (row + l) * groups + g, scale[l]);
      if (c.minimum != nullptr) put_stored(c, c.minimum, (row + l) * groups + g, minimum[l]);
    }
    for (ptrdiff_t i = 0; i < inputs; ++i) {
      const vf q = lanes.code(load(part + i * W), lanes.scale, lanes.minimum);
      int32_t codes[W];
      const vi whole = __builtin_convertvector(q == q ? q : vf{}, vi) + c.offset;
      __builtin_memcpy(codes, &whole, sizeof codes);
      for (ptrdiff_t l = 0; l < rows; ++l) c.codes[(row + l) * c.k + k0 + i] = (uint8_t)codes[l];
    }
  }
}

size_t fit_workspace(const Fit& c) { return (size_t)(imin(c.group, c.k) * W); }

struct FitWork {
  const Fit* call;
  float* workspace;
};

void fit_body(int thread, int threads, void* arg) {
  const FitWork& work = *(const FitWork*)arg;
  const Fit& c = *work.call;
  float* const part = work.workspace + (size_t)thread * fit_workspace(c);
  const ptrdiff_t blocks = div_up(c.n, W);
  for (ptrdiff_t b = blocks * thread / threads; b < blocks * (thread + 1) / threads; ++b)
    fit_rows(c, b * W, imin(W, c.n - b * W), part);
}

void fit_run(const Fit& c, float* workspace) {
  FitWork work{&c, workspace};
  parallel(c.threads, fit_body, &work);
}

}  // namespace
}  // namespace FANFOLD_NS

extern const FitKernels FANFOLD_TABLE;
const FitKernels FANFOLD_TABLE = {FANFOLD_NS::fit_workspace, FANFOLD_NS::fit_run};

}  // namespace fanfold
