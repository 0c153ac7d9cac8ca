// The form for few tokens (decode): memory bandwidth is all that counts, so each weight is read once, in place, and
// multiplied with every token while it is in a register. Inputs are float32 rows [tokens][ldx], padded with zeros.

constexpr int kFewTokens = 16;                // above it the panel form is faster (measured)
constexpr int kGroup = 8;                     // most tokens whose sums fit the registers
constexpr ptrdiff_t kFewChunk = 480;          // most outputs of one task
constexpr ptrdiff_t kRowBlock = 24;           // a multiple of every dot_rows_for
constexpr ptrdiff_t kAheadRows = 8;           // how far memory is asked for in advance
constexpr ptrdiff_t kInputBytes = 24 * 1024;  // of all tokens' inputs in use at once: they stay in L1
constexpr ptrdiff_t kDotInputs = 64 * W;      // of one chain of additions in a register

// Rows at once: as many accumulators as the registers hold beside one input and one weight of each row.
constexpr int dot_rows_for(int tokens) {
  return W == 16 ? (tokens <= 2   ? 8
                    : tokens == 3 ? 6
                    : tokens <= 6 ? 4
                                  : 3)
                 : (tokens == 1   ? 8
                    : tokens == 2 ? 4
                    : tokens <= 4 ? 3
                    : tokens <= 6 ? 2
                                  : 1);
}

template <int R, int T, class WT>
INL void dot_step(vf (&acc)[R][T], const WT* const (&rows)[R], ptrdiff_t k, const float* x, ptrdiff_t ldx) {
  vf w[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) w[r] = load_first(rows[r] + k);
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    const vf in = load(x + t * ldx);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r][t] += w[r] * in;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) w[r] = load_second(rows[r] + k);
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    const vf in = load(x + t * ldx + W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r][t] += w[r] * in;
  }
}

// sums[r * T + t] (+)= the products of inputs [k0, k1) of rows[r] and x[t], a vector of partial sums each. Rounding
// grows with a chain's length, so that chains are short and their sums added.
template <int R, int T, class WT>
INL void dot_block(const WT* const (&rows)[R], ptrdiff_t ahead, const float* x, ptrdiff_t ldx, ptrdiff_t k0,
                   ptrdiff_t k1, float* sums) {
  const ptrdiff_t whole = k1 - k1 % (2 * W);
  ptrdiff_t k = k0;
  do {
    vf acc[R][T] = {};
    const bool first = k == 0;
    for (const ptrdiff_t end = imin(whole, k + kDotInputs); k < end; k += 2 * W) {
      if (ahead != 0) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {  // the hardware's prefetchers start anew with each row; a hint may point anywhere
          const uintptr_t next = (uintptr_t)(rows[r] + k) + (uintptr_t)ahead;
          __builtin_prefetch((const void*)next, 0, 2);
          if (sizeof(WT) * 2 * W > 64) __builtin_prefetch((const void*)(next + 64), 0, 2);
        }
      }
      dot_step<R, T>(acc, rows, k, x + k, ldx);
    }
    if (k == whole && whole < k1) {  // copies, because reading on past the last row's end could fault
      WT tail[R][2 * W] = {};
      const WT* tails[R];
      for (int r = 0; r < R; ++r) {
        for (ptrdiff_t i = whole; i < k1; ++i) tail[r][i - whole] = rows[r][i];
        tails[r] = tail[r];
      }
      dot_step<R, T>(acc, tails, 0, x + whole, ldx);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        float* const to = sums + (r * T + t) * W;
        store(to, first ? acc[r][t] : load(to) + acc[r][t]);
      }
    }
  } while (k < whole);
}

// n rows x T tokens; sums  [n rounded up to R][T][W].
template <int T, class WT>
static void dot_rows(const WT* w, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t ahead, const float* x, ptrdiff_t ldx,
                     ptrdiff_t k0, ptrdiff_t k1, float* sums) {
  constexpr int R = dot_rows_for(T);
  for (ptrdiff_t i = 0; i < n; i += R) {
    const WT* rows[R];
    for (int r = 0; r < R; ++r) rows[r] = w + imin(i + r, n - 1) * stride;  // the last row again, its sums unused
    dot_block<R, T>(rows, ahead, x, ldx, k0, k1, sums + i * T * W);
  }
}

template <class WT>
static void dot_group(ptrdiff_t tokens, const WT* w, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t ahead, const float* x,
                      ptrdiff_t ldx, ptrdiff_t k0, ptrdiff_t k1, float* sums) {
  switch (tokens) {
    case 1:
      return dot_rows<1>(w, stride, n, ahead, x, ldx, k0, k1, sums);
    case 2:
      return dot_rows<2>(w, stride, n, ahead, x, ldx, k0, k1, sums);
    case 3:
      return dot_rows<3>(w, stride, n, ahead, x, ldx, k0, k1, sums);
    case 4:
      return dot_rows<4>(w, stride, n, ahead, x, ldx, k0, k1, sums);
    case 5:
      return dot_rows<5>(w, stride, n, ahead, x, ldx, k0, k1, sums);
    case 6:
      return dot_rows<6>(w, stride, n, ahead, x, ldx, k0, k1, sums);
    case 7:
      return dot_rows<7>(w, stride, n, ahead, x, ldx, k0, k1, sums);
    default:
      return dot_rows<8>(w, stride, n, ahead, x, ldx, k0, k1, sums);
  }
}

// Rows [n0, n0 + n) in blocks; within one, inputs in blocks that keep x in L1; within that, tokens in even groups.
template <class WT>
static void dot(const Matrix& m, ptrdiff_t n0, ptrdiff_t n, const float* x, ptrdiff_t ldx, ptrdiff_t K,
                ptrdiff_t tokens, float* out, ptrdiff_t ldo) {
  float partial[kRowBlock * kFewTokens * W];
  const ptrdiff_t fitting = kInputBytes / (ptrdiff_t)sizeof(float) / tokens;
  const ptrdiff_t step = fitting >= K ? K : fitting - fitting % (2 * W);
  const ptrdiff_t groups = div_up(tokens, kGroup);
  const ptrdiff_t ahead = kAheadRows * m.stride * (ptrdiff_t)sizeof(WT);
  for (ptrdiff_t i = 0; i < n; i += kRowBlock) {
    const WT* const w = (const WT*)m.data + (n0 + i) * m.stride;
    const ptrdiff_t rows = imin(kRowBlock, n - i);
    for (ptrdiff_t k0 = 0; k0 < K; k0 += step) {
      for (ptrdiff_t g = 0; g < groups; ++g) {
        const ptrdiff_t t0 = tokens * g / groups, t1 = tokens * (g + 1) / groups;
        dot_group(t1 - t0, w, m.stride, rows, g == 0 ? ahead : 0, x + t0 * ldx, ldx, k0, imin(K, k0 + step),
                  partial + t0 * kRowBlock * W);
      }
    }
    for (ptrdiff_t g = 0; g < groups; ++g) {
      const ptrdiff_t t0 = tokens * g / groups, T = tokens * (g + 1) / groups - t0;
      for (ptrdiff_t t = 0; t < T; ++t) {
        const float* const of_token = partial + (t0 * kRowBlock + t) * W;
        for (ptrdiff_t r = 0; r < rows; r += W) {
          const ptrdiff_t n_sums = imin(W, rows - r);
          vf v[W];
#pragma GCC unroll 16
          for (ptrdiff_t j = 0; j < W; ++j) v[j] = j < n_sums ? load(of_token + (r + j) * T * W) : vf{};
          const vf done = sums(v);
          __builtin_memcpy(out + (t0 + t) * ldo + i + r, &done, (size_t)n_sums * sizeof(float));
        }
      }
    }
  }
}

// A transposed matrix: kAxpyRows rows of its memory at a time, running sums in a buffer that stays in L1. The rows of a
// step are summed first, and the steps of a block: a chain of all K additions would lose accuracy.
constexpr ptrdiff_t kAxpyRows = 8;
constexpr ptrdiff_t kAxpyBlock = 64 * kAxpyRows;

// part  as large as out
template <class WT>
static void axpy(const Matrix& m, ptrdiff_t n0, ptrdiff_t n, const float* x, ptrdiff_t ldx, ptrdiff_t K,
                 ptrdiff_t tokens, float* out, ptrdiff_t ldo, float* part) {
  const uintptr_t ahead = (uintptr_t)(kAxpyRows * m.stride) * sizeof(WT);
  for (ptrdiff_t k = 0; k < K; k += kAxpyRows) {
    const ptrdiff_t rows = imin(kAxpyRows, K - k);
    const WT* const w = (const WT*)m.data + k * m.stride + n0;
    float* const block = k < kAxpyBlock ? out : part;
    const bool fresh = k % kAxpyBlock == 0;
    for (ptrdiff_t i = 0; i < n; i += W) {
      vf v[kAxpyRows];
      for (ptrdiff_t j = 0; j < kAxpyRows; ++j) {
        const WT* const from = w + j * m.stride + i;
        __builtin_prefetch((const void*)((uintptr_t)from + ahead), 0, 3);
        v[j] = j >= rows ? vf{} : n - i >= W ? load(from) : load_part(from, n - i);
      }
      for (ptrdiff_t t = 0; t < tokens; ++t) {  // ldx is a multiple of kAxpyRows, with zeros behind K
        const float* const in = x + t * ldx + k;
        vf sum = v[0] * in[0];
        for (ptrdiff_t j = 1; j < kAxpyRows; ++j) sum += v[j] * in[j];
        float* const to = block + t * ldo + i;
        store(to, fresh ? sum : load(to) + sum);
      }
    }
    if (block == part && ((k + kAxpyRows) % kAxpyBlock == 0 || k + kAxpyRows >= K)) {
      for (ptrdiff_t i = 0; i < tokens * ldo; i += W) store(out + i, load(out + i) + load(part + i));
    }
  }
}

// out[t * ldo + i] = dot(row n0 + i of m, x[t]) for i < n, t < tokens <= kFewTokens.
template <class WT>
static void few_product(const Matrix& m, ptrdiff_t n0, ptrdiff_t n, const float* x, ptrdiff_t ldx, ptrdiff_t K,
                        ptrdiff_t tokens, float* out, ptrdiff_t ldo, float* part) {
  if (m.transposed) return axpy<WT>(m, n0, n, x, ldx, K, tokens, out, ldo, part);
  dot<WT>(m, n0, n, x, ldx, K, tokens, out, ldo);
}

constexpr ptrdiff_t kRowMultiple = 2 * W > kAxpyRows ? 2 * W : kAxpyRows;

struct FewPlan {
  ptrdiff_t ldx, ldm, up_chunk, down_chunk, ldo;
  size_t shared, each;  // floats: for all threads, for each
};

// Small enough to balance the threads, large enough for long reads. Results do not depend on it.
INL ptrdiff_t few_chunk(const Matrix& m, ptrdiff_t outputs, int threads) {
  const ptrdiff_t unit = m.transposed ? 16 : kRowBlock;
  const ptrdiff_t tasks = (m.transposed ? 4 : 12) * (ptrdiff_t)threads;  // transposed: longer runs of memory
  return imin(round_up(div_up(outputs, tasks), unit), kFewChunk);
}

static FewPlan few_plan(const Call& c) {
  FewPlan p;
  p.ldx = c.up.data != nullptr ? round_up(c.d_model, kRowMultiple) : 0;
  p.ldm = round_up(c.d_ff, kRowMultiple);
  p.up_chunk = few_chunk(c.up, c.d_ff, c.threads);
  p.down_chunk = few_chunk(c.down, c.d_out, c.threads);
  p.ldo = round_up(imax(p.up_chunk, p.down_chunk), W);
  p.shared = (size_t)(c.tokens * (p.ldx + p.ldm));
  p.each = (size_t)(3 * c.tokens * p.ldo);
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
  float* const part = gate + c.tokens * p.ldo;
  if (gated) few_product<WT>(c.gate, f0, n, x, p.ldx, c.d_model, c.tokens, gate, ldo, part);
  few_product<WT>(c.up, f0, n, x, p.ldx, c.d_model, c.tokens, up, ldo, part);
  for (ptrdiff_t t = 0; t < c.tokens; ++t) {
    for (ptrdiff_t i = 0; i < ldo; ++i) {
      const bool real = i < n;  // the rest is never written by dot: give the vectors below something finite
      if (gated) gate[t * ldo + i] = real ? gate[t * ldo + i] + bias_at(c.gate.bias, c.w_dtype, f0 + i) : 0.0f;
      up[t * ldo + i] = real ? up[t * ldo + i] + bias_at(c.up.bias, c.w_dtype, f0 + i) : 0.0f;
    }
  }
  const float* const done = combine(c, c.gate.data != nullptr, gate, up, c.tokens * ldo);
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
  few_product<WT>(c.down, d0, n, m, p.ldm, c.d_ff, c.tokens, own, ldo, own + 2 * c.tokens * p.ldo);
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
