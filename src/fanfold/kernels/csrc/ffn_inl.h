// The whole FFN in one parallel region, for one instruction set. A tiny .cpp file for each defines
//   FANFOLD_NS (namespace), FANFOLD_TABLE (the exported Kernels), FANFOLD_W (floats in a vector),
//   FANFOLD_MR (rows of a tile)
// and includes this file, compiled with its own flags. Standard headers used here must bring no inline code.

#include <cstddef>
#include <cstdint>
#include <utility>

#if FANFOLD_W >= 8
#include <immintrin.h>
#endif

#include "core.h"
#include "parallel.h"

namespace fanfold {
namespace FANFOLD_NS {
namespace {

#include "vec_inl.h"
//
#include "act_inl.h"
#include "combine_inl.h"
#include "norm_inl.h"
#include "slopes_inl.h"
//
#include "few_inl.h"
//
#include "panel_inl.h"

struct Job {
  const Call* call;
  float* workspace;
  ptrdiff_t next[3];  // of packing, up, down
};

template <class WT>
void few(int thread, int threads, void* arg) {
  Job& job = *(Job*)arg;
  const Call& c = *job.call;
  const FewPlan p = few_plan(c);
  float* const x = job.workspace;
  float* const m = x + c.tokens * p.ldx;
  float* const own = job.workspace + p.shared + p.each * (size_t)thread;
  if (c.up.data != nullptr) {
    for (ptrdiff_t i; (i = take(job.next[1])) * p.up_chunk < c.d_ff;) few_up<WT>(c, p, x, m, own, i * p.up_chunk);
    finish(job, 1, thread, threads);
  }
  for (ptrdiff_t i; (i = take(job.next[2])) * p.down_chunk < c.d_out;) few_down<WT>(c, p, m, own, i * p.down_chunk);
}

void few_prepare(const Call& c, float* workspace) {
  const FewPlan p = few_plan(c);
  float* const m = workspace + c.tokens * p.ldx;
  if (c.up.data == nullptr) return few_rows(c, c.d_ff, c.down, m, p.ldm);
  few_rows(c, c.d_model, c.up, workspace, p.ldx);
  const bool pairs = c.w_dtype == kBFloat16 && !c.down.transposed;
  for (ptrdiff_t t = 0; t < c.tokens; ++t) {
    for (ptrdiff_t k = c.d_ff; k < p.ldm; ++k) m[t * p.ldm + (pairs ? pair_position<uint16_t>(k) : k)] = 0.0f;
  }
}

template <class WT>
void panel(int thread, int threads, void* arg) {
  Job& job = *(Job*)arg;
  const Call& c = *job.call;
  const PanelPlan p = panel_plan(c);
  const bool whole = c.up.data != nullptr;
  float* const x = job.workspace;
  float* const m = x + p.x_floats;
  float* const own = job.workspace + p.shared + p.each * (size_t)thread;
  for (ptrdiff_t first = 0; first < c.tokens; first += p.block) {
    const ptrdiff_t tokens = imin(p.block, c.tokens - first), K = whole ? c.d_model : c.d_ff;
    for (ptrdiff_t i; (i = take(job.next[0])) < pack_tasks(tokens, K);) {
      pack_inputs(c, first, tokens, K, whole ? x : m, i);
    }
    finish(job, 0, thread, threads);
    const ptrdiff_t up_step = p.up_tiles * MR, down_step = p.down_tiles * MR;
    if (whole) {
      for (ptrdiff_t i; (i = take(job.next[1])) * up_step < c.d_ff;) {
        panel_up<WT>(c, p, x, m, own, tokens, i * up_step);
      }
      finish(job, 1, thread, threads);
    }
    for (ptrdiff_t i; (i = take(job.next[2])) * down_step < c.d_out;) {
      panel_down<WT>(c, p, m, own, first, tokens, i * down_step);
    }
    finish(job, 2, thread, threads);
  }
}

bool is_few(const Call& c) { return c.tokens <= kFewTokens; }

size_t workspace(const Call& c) {
  if (is_few(c)) {
    const FewPlan p = few_plan(c);
    return p.shared + p.each * (size_t)c.threads;
  }
  const PanelPlan p = panel_plan(c);
  return p.shared + p.each * (size_t)c.threads;
}

void run(const Call& c, float* workspace) {
  Job job = {&c, workspace, {0, 0, 0}};
  const bool narrow = c.w_dtype == kBFloat16;
  if (is_few(c)) {
    few_prepare(c, workspace);
    parallel(c.threads, narrow ? few<uint16_t> : few<float>, &job);
  } else {
    parallel(c.threads, narrow ? panel<uint16_t> : panel<float>, &job);
  }
}

void activation(int act, const double* params, const float* src, float* dst, ptrdiff_t n) {
  with_activation(act, params, [=](auto f) {
    constexpr ptrdiff_t kSome = Lanes<Some>::count;
    ptrdiff_t i = 0;
    for (; i + kSome <= n; i += kSome) put(dst + i, f(Lanes<Some>::at(src + i)));
    for (; i < n; i += W) {
      float part[W] = {};
      const ptrdiff_t count = imin(W, n - i);
      for (ptrdiff_t j = 0; j < count; ++j) part[j] = src[i + j];
      store(part, f(load(part)));
      for (ptrdiff_t j = 0; j < count; ++j) dst[i + j] = part[j];
    }
  });
}

}  // namespace
}  // namespace FANFOLD_NS

extern const Kernels FANFOLD_TABLE;
const Kernels FANFOLD_TABLE = {FANFOLD_NS::workspace, FANFOLD_NS::run, FANFOLD_NS::activation, FANFOLD_NS::middle,
                               FANFOLD_NS::norm};

}  // namespace fanfold
