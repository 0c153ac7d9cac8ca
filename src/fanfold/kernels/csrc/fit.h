// Rounding a matrix to integer codes: fanfold/formats/fit.py says what is chosen, this does it many groups at a time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fanfold {

// A search for the scales and minima of the groups of [n, k] weights, and their codes. Scales are tried in this order:
// range / plain, range / steps[i] refined by least squares, and the best so far refined `again` times; range is
// max - min with a minimum, else the largest |w|, with its sign if `is_signed`.
struct Fit {
  int threads = 1;
  const float* w = nullptr;  // finite; row i at w + i * stride
  ptrdiff_t stride = 0;
  ptrdiff_t n = 0, k = 0;
  ptrdiff_t group = 0;            // inputs of a group; the last of a row may have fewer
  const float* weight = nullptr;  // [k]: what an input's squared error counts
  float low = 0, high = 0;        // codes without offset
  int offset = 0;                 // added to a code as stored
  bool is_signed = false;         // scales may be negative
  bool half = false;              // scales and minima are float16, else float32
  float plain = 1;                // of the first scale
  const float* steps = nullptr;   // [n_steps]
  ptrdiff_t n_steps = 0;
  int again = 0;
  uint8_t* codes = nullptr;  // [n, k]
  void* scale = nullptr;     // [n, groups]; not finite where the first scale or minimum cannot be stored
  void* minimum = nullptr;   // [n, groups], or nullptr: none
};

// floats of one thread's workspace, and the search with `threads` such workspaces. Every instruction set gives the same
// bits: a lane is a group of its own, its sums run from its first weight to its last, and nothing is contracted.
struct FitKernels {
  size_t (*workspace)(const Fit&);
  void (*run)(const Fit&, float* workspace);
};

void fit(const FitKernels& isa, const Fit& call);

}  // namespace fanfold
