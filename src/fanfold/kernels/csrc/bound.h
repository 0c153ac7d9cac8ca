// A product, FFN or norm with its weights bound, as Python holds it.
#pragma once

#include <nanobind/nanobind.h>

#include "core.h"
#include "packed.h"

constexpr ptrdiff_t kTogetherTokens = 16;  // products of one x of more tokens are worth a pass each

template <class T = const void>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// What is left to say per call is where x and y are, and how many tokens.
template <class Kernels, class AnyCall>
struct BoundCall {
  const Kernels* kernels;
  AnyCall call;

  AnyCall with(int threads, uintptr_t x, ptrdiff_t x_stride, uintptr_t y, ptrdiff_t y_stride, ptrdiff_t tokens) const {
    AnyCall c = call;
    c.threads = threads < 1 ? 1 : threads;
    c.x = pointer(x);
    c.x_stride = x_stride;
    c.y = pointer<void>(y);
    c.y_stride = y_stride;
    c.tokens = tokens;
    return c;
  }

  void run(int threads, uintptr_t x, ptrdiff_t x_stride, uintptr_t y, ptrdiff_t y_stride, ptrdiff_t tokens) const {
    const AnyCall c = with(threads, x, x_stride, y, y_stride, tokens);
    const nanobind::gil_scoped_release release;
    fanfold::run(*kernels, c);
  }
};

using Bound = BoundCall<fanfold::Kernels, fanfold::Call>;
using BoundNorm = BoundCall<fanfold::Kernels, fanfold::Norm>;
using BoundPacked = BoundCall<fanfold::PackedKernels, fanfold::PackedCall>;
