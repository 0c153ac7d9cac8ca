// The form for few tokens (decode): memory bandwidth is all that counts, so each weight is read once, in place, and
// multiplied with every token while it is in a register. Inputs are float32 rows [tokens][ldx], padded with zeros.

constexpr int kFewTokens = 8;     // above it the panel form is faster (measured)
constexpr int kFewChunk = 512;    // most outputs of one task
constexpr int kFewMinChunk = 16;  // fewest

constexpr ptrdiff_t kAheadRows = 8;  // how far memory is asked for in advance

// Rows at once: as many accumulators as the registers hold, and several streams of memory reads.
constexpr int dot_rows_for(int tokens) {
  return W == 16 ? (tokens <= 2 ? 8 : tokens <= 6 ? 4 : 2) : (tokens == 1 ? 8 : tokens <= 3 ? 4 : tokens <= 6 ? 2 : 1);
}

template <int R, int T, class WT>
INL void dot_step(vf (&acc)[R][T], const WT* const (&rows)[R], ptrdiff_t k, const float* x, ptrdiff_t ldx) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    vf a, b;
    load_pair(rows[r] + k, a, b);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) acc[r][t] += a * load(x + t * ldx);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) acc[r][t] += b * load(x + t * ldx + W);
  }
}

// out[t * ldo + r] = dot(rows[r], x[t]).
template <int R, int T, class WT>
static void dot_block(const WT* const (&rows)[R], ptrdiff_t ahead, const float* x, ptrdiff_t ldx, ptrdiff_t K,
                      float* out, ptrdiff_t ldo) {
  vf acc[R][T] = {};
  const ptrdiff_t whole = K - K % (2 * W);
  for (ptrdiff_t k = 0; k < whole; k += 2 * W) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {  // the hardware's prefetchers start anew with each row; a hint may point anywhere
      const uintptr_t next = (uintptr_t)(rows[r] + k) + (uintptr_t)ahead;
      __builtin_prefetch((const void*)next, 0, 2);
      if (sizeof(WT) * 2 * W > 64) __builtin_prefetch((const void*)(next + 64), 0, 2);
    }
    dot_step<R, T>(acc, rows, k, x + k, ldx);
  }
  if (whole < K) {  // copies, because reading on past the last row's end could fault
    WT tail[R][2 * W] = {};
    const WT* tails[R];
    for (int r = 0; r < R; ++r) {
      for (ptrdiff_t k = whole; k < K; ++k) tail[r][k - whole] = rows[r][k];
      tails[r] = tail[r];
    }
    dot_step<R, T>(acc, tails, 0, x + whole, ldx);
  }
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < T; ++t) out[t * ldo + r] = sum(acc[r][t]);
  }
}

template <int T, class WT>
static void dot(const Matrix& m, ptrdiff_t n0, ptrdiff_t n, const float* x, ptrdiff_t ldx, ptrdiff_t K, float* out,
                ptrdiff_t ldo) {
  constexpr int R = dot_rows_for(T);
  const WT* const w = (const WT*)m.data;
  const ptrdiff_t ahead = (R < kAheadRows ? kAheadRows : R) * m.stride * (ptrdiff_t)sizeof(WT);
  for (ptrdiff_t i = 0; i < n; i += R) {
    const WT* rows[R];
    float found[T * R];
    for (int r = 0; r < R; ++r) rows[r] = w + (n0 + imin(i + r, n - 1)) * m.stride;  // the last row again, unused
    dot_block<R, T>(rows, ahead, x, ldx, K, found, R);
    for (int t = 0; t < T; ++t) {
      for (ptrdiff_t r = 0; r < imin(R, n - i); ++r) out[t * ldo + i + r] = found[t * R + r];
    }
  }
}

// A transposed matrix: kAxpyRows rows of its memory at a time, running sums in a buffer that stays in L1. The rows of a
// step are summed first: a chain of all K additions would lose accuracy.
constexpr ptrdiff_t kAxpyRows = 8;

template <class WT>
static void axpy(const Matrix& m, ptrdiff_t n0, ptrdiff_t n, const float* x, ptrdiff_t ldx, ptrdiff_t K,
                 ptrdiff_t tokens, float* out, ptrdiff_t ldo) {
  const uintptr_t ahead = (uintptr_t)(kAxpyRows * m.stride) * sizeof(WT);
  for (ptrdiff_t k = 0; k < K; k += kAxpyRows) {
    const ptrdiff_t rows = imin(kAxpyRows, K - k);
    const WT* const w = (const WT*)m.data + k * m.stride + n0;
    for (ptrdiff_t i = 0; i < n; i += W) {
      vf v[kAxpyRows];
      for (ptrdiff_t j = 0; j < kAxpyRows; ++j) {
        const WT* const from = w + j * m.stride + i;
        __builtin_prefetch((const void*)((uintptr_t)from + ahead), 0, 3);
        v[j] = j >= rows ? vf{} : n - i >= W ? load(from) : load_part(from, n - i);
      }
      for (ptrdiff_t t = 0; t < tokens; ++t) {  // ldx is a multiple of kAxpyRows, with zeros behind K
        const float* const in = x + t * ldx + k;
        float* const to = out + t * ldo + i;
        vf sum = v[0] * in[0];
        for (ptrdiff_t j = 1; j < kAxpyRows; ++j) sum += v[j] * in[j];
        store(to, k == 0 ? sum : load(to) + sum);
      }
    }
  }
}

// out[t * ldo + i] = dot(row n0 + i of m, x[t]) for i < n, t < tokens <= kFewTokens.
template <class WT>
static void few_product(const Matrix& m, ptrdiff_t n0, ptrdiff_t n, const float* x, ptrdiff_t ldx, ptrdiff_t K,
                        ptrdiff_t tokens, float* out, ptrdiff_t ldo) {
  if (m.transposed) return axpy<WT>(m, n0, n, x, ldx, K, tokens, out, ldo);
  switch (tokens) {
    case 1:
      return dot<1, WT>(m, n0, n, x, ldx, K, out, ldo);
    case 2:
      return dot<2, WT>(m, n0, n, x, ldx, K, out, ldo);
    case 3:
      return dot<3, WT>(m, n0, n, x, ldx, K, out, ldo);
    case 4:
      return dot<4, WT>(m, n0, n, x, ldx, K, out, ldo);
    case 5:
      return dot<5, WT>(m, n0, n, x, ldx, K, out, ldo);
    case 6:
      return dot<6, WT>(m, n0, n, x, ldx, K, out, ldo);
    case 7:
      return dot<7, WT>(m, n0, n, x, ldx, K, out, ldo);
    default:
      return dot<8, WT>(m, n0, n, x, ldx, K, out, ldo);
  }
}

constexpr ptrdiff_t kRowMultiple = 2 * W > kAxpyRows ? 2 * W : kAxpyRows;

struct FewPlan {
  ptrdiff_t ldx, ldm, up_chunk, down_chunk, ldo;
  size_t shared, each;  // floats: for all threads, for each
};

// Small enough to balance the threads, large enough for long reads. Results do not depend on it.
INL ptrdiff_t few_chunk(ptrdiff_t outputs, int threads) {
  const ptrdiff_t wanted = round_up(div_up(outputs, 12 * (ptrdiff_t)threads), kFewMinChunk);
  return imin(imax(wanted, kFewMinChunk), kFewChunk);
}

static FewPlan few_plan(const Call& c) {
  FewPlan p;
  p.ldx = c.up.data != nullptr ? round_up(c.d_model, kRowMultiple) : 0;
  p.ldm = round_up(c.d_ff, kRowMultiple);
  p.up_chunk = few_chunk(c.d_ff, c.threads);
  p.down_chunk = few_chunk(c.d_out, c.threads);
  p.ldo = imax(p.up_chunk, p.down_chunk);
  p.shared = (size_t)(c.tokens * (p.ldx + p.ldm));
  p.each = (size_t)(2 * c.tokens * p.ldo);
  return p;
}

// Rows of float32 in the order in which the matrix wants them, zeros behind.
template <class XT>
static void few_rows_from(const XT* x, ptrdiff_t stride, ptrdiff_t tokens, ptrdiff_t K, bool pairs, float* out,
                          ptrdiff_t ldx) {
  for (ptrdiff_t t = 0; t < tokens; ++t) {
    const XT* const from = x + t * stride;
    float* const to = out + t * ldx;
    const ptrdiff_t whole = K - K % W;
    if (pairs) {
      for (ptrdiff_t k = 0; k < K; ++k) to[pair_position<uint16_t>(k)] = widen(from[k]);
      for (ptrdiff_t k = K; k < ldx; ++k) to[pair_position<uint16_t>(k)] = 0.0f;
      continue;
    }
    for (ptrdiff_t k = 0; k < whole; k += W) store(to + k, load(from + k));
    for (ptrdiff_t k = whole; k < ldx; ++k) to[k] = k < K ? widen(from[k]) : 0.0f;
  }
}
static void few_rows(const Call& c, ptrdiff_t K, const Matrix& m, float* out, ptrdiff_t ldx) {
  const bool pairs = c.w_dtype == kBFloat16 && !m.transposed;
  if (c.x_dtype == kFloat32) return few_rows_from((const float*)c.x, c.x_stride, c.tokens, K, pairs, out, ldx);
  few_rows_from((const uint16_t*)c.x, c.x_stride, c.tokens, K, pairs, out, ldx);
}

template <class WT>
static void few_up(const Call& c, const FewPlan& p, const float* x, float* m, float* own, ptrdiff_t f0) {
  const ptrdiff_t n = imin(p.up_chunk, c.d_ff - f0), ldo = round_up(n, W);
  const bool gated = c.gate.data != nullptr;
  float* const up = own;
  float* const gate = own + c.tokens * p.ldo;
  if (gated) few_product<WT>(c.gate, f0, n, x, p.ldx, c.d_model, c.tokens, gate, ldo);
  few_product<WT>(c.up, f0, n, x, p.ldx, c.d_model, c.tokens, up, ldo);
  for (ptrdiff_t t = 0; t < c.tokens; ++t) {
    for (ptrdiff_t i = 0; i < ldo; ++i) {
      const bool real = i < n;  // the rest is never written by dot: give the vectors below something finite
      if (gated) gate[t * ldo + i] = real ? gate[t * ldo + i] + bias_at(c.gate.bias, c.w_dtype, f0 + i) : 0.0f;
      up[t * ldo + i] = real ? up[t * ldo + i] + bias_at(c.up.bias, c.w_dtype, f0 + i) : 0.0f;
    }
  }
  const float* const done = combine(c, gate, up, c.tokens * ldo);
  const bool pairs = sizeof(WT) == 2 && !c.down.transposed;
  for (ptrdiff_t t = 0; t < c.tokens; ++t) {
    for (ptrdiff_t i = 0; i < n; ++i) {
      m[t * p.ldm + (pairs ? pair_position<WT>(f0 + i) : f0 + i)] = done[t * ldo + i];
    }
  }
}

template <class WT>
static void few_down(const Call& c, const FewPlan& p, const float* m, float* own, ptrdiff_t d0) {
  const ptrdiff_t n = imin(p.down_chunk, c.d_out - d0), ldo = round_up(n, W);
  few_product<WT>(c.down, d0, n, m, p.ldm, c.d_ff, c.tokens, own, ldo);
  for (ptrdiff_t t = 0; t < c.tokens; ++t) {
    for (ptrdiff_t i = 0; i < n; ++i) {
      const float v = own[t * ldo + i] + bias_at(c.down.bias, c.w_dtype, d0 + i);
      const ptrdiff_t at = t * c.y_stride + d0 + i;
      if (c.y_dtype == kFloat32) {
        put((float*)c.y + at, v);
      } else {
        put((uint16_t*)c.y + at, v);
      }
    }
  }
}
