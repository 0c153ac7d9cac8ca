// RMS norms. Included by ffn_inl.h.

constexpr ptrdiff_t kNormChains = 4;                    // additions need not wait for each other
constexpr ptrdiff_t kNormBlock = 64 * kNormChains * W;  // inputs of one float32 sum: rounding grows with its length

template <class T>
static double sum_of_squares(const T* x, ptrdiff_t n) {
  double total = 0.0;
  for (ptrdiff_t begin = 0; begin < n; begin += kNormBlock) {
    const ptrdiff_t end = imin(n, begin + kNormBlock);
    vf chains[kNormChains] = {};
    for (ptrdiff_t k = begin; k < end; k += kNormChains * W) {
#pragma GCC unroll 4
      for (ptrdiff_t i = 0; i < kNormChains; ++i) {
        const ptrdiff_t at = k + i * W;
        if (at >= end) break;
        const vf v = end - at >= W ? load(x + at) : load_part(x + at, end - at);
        chains[i] += v * v;
      }
    }
    float parts[W];
    store(parts, (chains[0] + chains[1]) + (chains[2] + chains[3]));
    for (const float part : parts) total += (double)part;
  }
  return total;
}

// x may be y.
template <class T>
static void norm_row(const Norm& c, const T* x, T* y) {
  const T* const weight = (const T*)c.weight;
  const float scale = (float)(1.0 / __builtin_sqrt(sum_of_squares(x, c.width) / (double)c.width + c.eps));
  const ptrdiff_t whole = c.width - c.width % W;
  for (ptrdiff_t k = 0; k < whole; k += W) put(y + k, (load(x + k) * scale) * (load(weight + k) + c.offset));
  for (ptrdiff_t k = whole; k < c.width; ++k) put(y + k, (widen(x[k]) * scale) * (widen(weight[k]) + c.offset));
}

void norm_body(int thread, int threads, void* arg) {
  const Norm& c = *(const Norm*)arg;
  for (ptrdiff_t t = c.tokens * thread / threads, end = c.tokens * (thread + 1) / threads; t < end; ++t) {
    const ptrdiff_t from = t * c.x_stride, to = t * c.y_stride;
    if (c.dtype == kFloat32) {
      norm_row(c, (const float*)c.x + from, (float*)c.y + to);
    } else {
      norm_row(c, (const uint16_t*)c.x + from, (uint16_t*)c.y + to);
    }
  }
}

void norm(const Norm& c) { parallel(c.threads, norm_body, (void*)&c); }
