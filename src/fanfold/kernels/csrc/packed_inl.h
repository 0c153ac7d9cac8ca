// FFNs on packed matrices, for one instruction set: included by packed_isa.h inside its namespace, after vec_inl.h and
// act_inl.h. A tile is R columns of 16 outputs times T tokens; its sums stay in registers. What the tokens bring is
// prepared once (Inputs), the coefficients of a few hundred channels never leave the caches.

#include "dot_inl.h"

constexpr int V = (int)kLanes / W;                       // vectors of a column
constexpr int kPairTokens = W == 16 ? 14 : 0;            // most tokens of a float tile of two columns; 0: no such tiles
constexpr int kOneTokens = W == 16 ? 14 : W == 8 ? 6 : 3;  // … of one column
constexpr int kIntPairTokens = W == 16 ? 6 : 0;
constexpr int kIntOneTokens = W == 16 ? 12 : 2;
constexpr ptrdiff_t kSpan = 512;               // most inputs of a step over all tokens: its weights stay in L1
constexpr ptrdiff_t kFewTokens = 16;           // up to here weights are read once, from memory: no second copy of them
constexpr ptrdiff_t kBlockTokens = 256;        // of one pass over the weights
constexpr ptrdiff_t kAheadBytes = 2048;        // how far memory is asked for in advance

enum Mode { kFloatMode, kInt8Mode };

// What the tokens bring to a matrix: rows of floats, or of bytes with a scale for each group.
struct Inputs {
  Mode mode;
  ptrdiff_t tokens, ld, groups;  // groups: of a row, and the rows' pitch in scale, start and sum
  float* f;
  int8_t* q;
  float* scale;
  int32_t* start;  // - offset * sum of the codes: where an integer sum begins
  float* sum;      // scale * sum of the codes: what a minimum is multiplied with
};

INL Mode mode_of(const Packed& m) { return m.int8_activations ? kInt8Mode : kFloatMode; }

// The rows' pitch: whole activation groups, and not a multiple of a page, or all rows would share a few cache sets.
INL ptrdiff_t row_pitch(const Packed& m) {
  return mode_of(m) == kInt8Mode ? round_up(m.k, 128) + 64 : round_up(m.k, 16) + 16;
}

INL size_t line_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Lays the arrays of `tokens` rows out from `at` on; returns what follows them.
INL size_t place_inputs(const Packed& m, ptrdiff_t tokens, uintptr_t base, size_t at, Inputs* in) {
  in->mode = mode_of(m);
  in->tokens = tokens;
  in->ld = row_pitch(m);
  if (in->mode == kFloatMode) {
    in->f = (float*)(base + at);
    return at + line_up((size_t)(tokens * in->ld) * sizeof(float));
  }
  in->groups = div_up(m.k, m.activation_group);
  const size_t table = line_up((size_t)(tokens * in->groups) * 4);
  in->q = (int8_t*)(base + at);
  at += line_up((size_t)(tokens * in->ld));
  in->scale = (float*)(base + at);
  in->start = (int32_t*)(base + at + table);
  in->sum = (float*)(base + at + 2 * table);
  return at + 3 * table;
}

// round(a b) to nearest, ties to even, of the exact product: |a b| < 2^21.
INL vi rounded_product(vf a, float b) {
#ifdef __FMA__
  return (vi)(a * b + 0x1.8p23f) - 0x4b400000;  // contracted to one rounding
#else
  Pair p = to_double(a);
  p.low = (p.low * (double)b + 0x1.8p52) - 0x1.8p52;
  p.high = (p.high * (double)b + 0x1.8p52) - 0x1.8p52;
  return __builtin_convertvector(to_float(p), vi);
#endif
}

// One group of a token: codes = round(v / scale), scale = max |v| / 127. Returns whether all of v are finite.
INL bool quantize_group(const float* v, ptrdiff_t n, int8_t* q, float* scale, int32_t* total) {
  vf top = splat(0.0f);
  vi odd = splat_i(0);  // lanes that are infinite or NaN
  for (ptrdiff_t i = 0; i < n; i += W) {
    const vf a = vabs(load(v + i));
    top = a > top ? a : top;
    odd |= (vi)a >= 0x7f800000;
  }
  float most = 0.0f;
  int32_t bad = 0;
  for (int i = 0; i < W; ++i) {
    most = top[i] > most ? top[i] : most;
    bad |= odd[i];
  }
  *scale = most / 127.0f;
  if (bad != 0) {
    *total = 0;
    for (ptrdiff_t i = 0; i < n; ++i) q[i] = 0;
    return false;
  }
  // 127 / most overflows for the smallest numbers: those are brought up first.
  const float lift = most < 0x1p-64f ? 0x1p64f : 1.0f;
  const float inverse = most > 0.0f ? 127.0f / (most * lift) : 0.0f;
  vi sum = splat_i(0);
  for (ptrdiff_t i = 0; i < n; i += W) {
    const vi code = rounded_product(load(v + i) * lift, inverse);
    sum += code;
    typedef int8_t vc __attribute__((vector_size(W)));
    const vc narrow = __builtin_convertvector(code, vc);
    __builtin_memcpy(q + i, &narrow, sizeof narrow);
  }
  int32_t all = 0;
  for (int i = 0; i < W; ++i) all += sum[i];
  *total = all;
  return true;
}

// Inputs [k0, k0 + n) of token t, from floats padded with zeros to whole groups. k0 is a multiple of the group.
INL bool quantize_row(const Packed& m, const Inputs& in, ptrdiff_t t, ptrdiff_t k0, ptrdiff_t n, const float* v) {
  bool finite = true;
  for (ptrdiff_t k = 0; k < n; k += m.activation_group) {
    int32_t total;
    const ptrdiff_t at = t * in.groups + (k0 + k) / m.activation_group;
    finite &= quantize_group(v + k, m.activation_group, in.q + t * in.ld + k0 + k, in.scale + at, &total);
    in.start[at] = -m.offset * total;
    in.sum[at] = in.scale[at] * (float)total;
  }
  return finite;
}

template <class XT>
INL void widen_row(const XT* from, ptrdiff_t n, float* to, ptrdiff_t padded) {
  ptrdiff_t k = 0;
  for (; k + W <= n; k += W) store(to + k, load(from + k));
  for (; k < n; ++k) to[k] = widen(from[k]);
  for (; k < padded; ++k) to[k] = 0.0f;
}

constexpr ptrdiff_t kRowPart = 1024;  // inputs converted at a time; a multiple of every group

// Prepares token `t` of the call's block that begins at token `first`.
static bool take_input(const PackedCall& c, const Packed& m, const Inputs& in, ptrdiff_t first, ptrdiff_t t) {
  const ptrdiff_t at = (first + t) * c.x_stride;
  bool finite = true;
  float part[kRowPart];
  for (ptrdiff_t k = 0; k < m.k; k += kRowPart) {
    const ptrdiff_t n = imin(kRowPart, m.k - k);
    const bool floats = in.mode == kFloatMode;
    float* const to = floats ? in.f + t * in.ld + k : part;
    const ptrdiff_t padded = floats ? imin(kRowPart, in.ld - k) : round_up(n, 128);
    if (c.x_dtype == kFloat32) {
      widen_row((const float*)c.x + at + k, n, to, padded);
    } else {
      widen_row((const uint16_t*)c.x + at + k, n, to, padded);
    }
    if (!floats) finite &= quantize_row(m, in, t, k, n, part);
  }
  return finite;
}

// ---- float tiles ----

enum Source { kFloats, kPairs, kHalves };  // of a column's lines: float32, bfloat16 pairs of inputs, float16

// c[t * ldc + r * 16 + lane] += products of `inputs` inputs (whole steps) of R columns and T tokens.
template <int R, int T, Source S>
static void float_tile(const uint8_t* const* columns, ptrdiff_t inputs, const float* x, ptrdiff_t ldx, float* c,
                       ptrdiff_t ldc, bool ahead) {
  constexpr int kStep = S == kPairs ? 2 : 1;               // inputs of a line
  constexpr int kLine = S == kHalves ? 32 : 64;            // bytes of it
  constexpr int U = R * T * V >= 8 ? 1 : 8 / (R * T * V);  // chains, so that additions need not wait for each other
  vf acc[U][R][T][V];
#pragma GCC unroll 8
  for (int u = 0; u < U; ++u) {
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[u][r][t][v] = vf{};
      }
    }
  }
  const uint8_t* w[R];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) w[r] = columns[r];
  const auto step = [&](int u, ptrdiff_t k) __attribute__((always_inline)) {
    vf first[R][V], second[R][V];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      if (ahead) __builtin_prefetch((const void*)((uintptr_t)w[r] + kAheadBytes), 0, 3);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        if constexpr (S == kFloats) {
          first[r][v] = load((const float*)w[r] + v * W);
        } else if constexpr (S == kHalves) {
          first[r][v] = load_half(w[r] + v * W * 2);
        } else {
          first[r][v] = load_first((const uint16_t*)w[r] + v * W * 2);
          second[r][v] = load_second((const uint16_t*)w[r] + v * W * 2);
        }
      }
      w[r] += kLine;
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      const vf in = splat(x[t * ldx + k]);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[u][r][t][v] += first[r][v] * in;
      }
      if constexpr (S == kPairs) {
        const vf next = splat(x[t * ldx + k + 1]);
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) acc[u][r][t][v] += second[r][v] * next;
        }
      }
    }
  };
  ptrdiff_t k = 0;
  for (; k + U * kStep <= inputs; k += U * kStep) {
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) step(u, k + u * kStep);
  }
  for (; k < inputs; k += kStep) step(0, k);
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        vf sum = acc[0][r][t][v];
#pragma GCC unroll 8
        for (int u = 1; u < U; ++u) sum += acc[u][r][t][v];
        float* const to = c + t * ldc + r * kLanes + v * W;
        store(to, load(to) + sum);
      }
    }
  }
}

template <int R, Source S, int Most>
static void float_tiles(ptrdiff_t tokens, const uint8_t* const* columns, ptrdiff_t inputs, const float* x,
                        ptrdiff_t ldx, float* c, ptrdiff_t ldc, bool ahead) {
  if constexpr (Most > 1) {
    if (tokens < Most) return float_tiles<R, S, Most - 1>(tokens, columns, inputs, x, ldx, c, ldc, ahead);
  }
  float_tile<R, Most, S>(columns, inputs, x, ldx, c, ldc, ahead);
}

// ---- integer tiles ----

// How a column's codes are scaled: once at the end (one scale a row), by groups, or by groups with a minimum.
enum Scaling { kByRow, kByGroup, kByGroupWithMinimum };

struct IntTile {
  const uint8_t* columns[2];  // where the first block begins
  ptrdiff_t inputs;           // whole blocks, but for the matrix's last
  ptrdiff_t group, block;     // inputs
  ptrdiff_t header;           // bytes, of a whole block
  const int8_t* q;
  const float* scale;
  const int32_t* start;
  const float* sum;
  ptrdiff_t ldq, ldg;
  float* c;
  ptrdiff_t ldc;
  bool ahead;
};

// c += as in float_tile. Nibbles: codes of 4 bits, two to a byte.
template <int R, int T, bool Nibbles, Scaling S>
static void int_tile(const IntTile& tile) {
  vf acc[R][T][V];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][t][v] = load(tile.c + t * tile.ldc + r * kLanes + v * W);
    }
  }
  const uint8_t* w[R];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) w[r] = tile.columns[r];
  const ptrdiff_t ldq = tile.ldq, ldg = tile.ldg, group = tile.group;
  const int8_t* q = tile.q;
  ptrdiff_t g = 0;
  for (ptrdiff_t k0 = 0; k0 < tile.inputs; k0 += tile.block) {
    const ptrdiff_t inputs = imin(tile.block, tile.inputs - k0), groups = div_up(inputs, group);
    const uint8_t* scales[R];
    const ptrdiff_t header =
        S == kByRow || inputs == tile.block ? tile.header : round_up(groups * (S == kByGroup ? 32 : 64), 64);
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      scales[r] = w[r];
      w[r] += header;
    }
    for (ptrdiff_t i = 0; i < groups; ++i, ++g) {
      vi sum[R][T][V];
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
        const vi start = splat_i(tile.start[t * ldg + g]);
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sum[r][t][v] = start;
        }
      }
      const ptrdiff_t n = imin(group, inputs - i * group);
      constexpr int kStep = Nibbles ? 8 : 4;
      for (ptrdiff_t k = 0; k < n; k += kStep, q += kStep) {
        vi low[R][V], high[R][V];
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
          if (tile.ahead) __builtin_prefetch((const void*)((uintptr_t)w[r] + kAheadBytes), 0, 3);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) {
            const vi codes = load_i(w[r] + v * W * 4);
            if constexpr (Nibbles) {
              low[r][v] = codes & 0x0f0f0f0f;
              high[r][v] = (vi)((vu)codes >> 4) & 0x0f0f0f0f;
            } else {
              low[r][v] = codes;
            }
          }
          w[r] += 64;
        }
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
          const vi x = splat4(q + t * ldq);
#pragma GCC unroll 2
          for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
              sum[r][t][v] = Nibbles ? dot4_small(sum[r][t][v], low[r][v], x) : dot4(sum[r][t][v], low[r][v], x);
            }
          }
        }
        if constexpr (Nibbles) {
#pragma GCC unroll 16
          for (int t = 0; t < T; ++t) {
            const vi x = splat4(q + t * ldq + 4);
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
              for (int v = 0; v < V; ++v) sum[r][t][v] = dot4_small(sum[r][t][v], high[r][v], x);
            }
          }
        }
      }
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          const vf scale = S == kByRow ? vf{} : load_half(scales[r] + i * 32 + v * W * 2);
          const vf least = S == kByGroupWithMinimum ? load_half(scales[r] + (groups + i) * 32 + v * W * 2) : vf{};
#pragma GCC unroll 16
          for (int t = 0; t < T; ++t) {
            const vf value = __builtin_convertvector(sum[r][t][v], vf);
            const float s = tile.scale[t * ldg + g];
            acc[r][t][v] += S == kByRow ? value * s : value * (scale * s);
            if constexpr (S == kByGroupWithMinimum) acc[r][t][v] += least * tile.sum[t * ldg + g];
          }
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store(tile.c + t * tile.ldc + r * kLanes + v * W, acc[r][t][v]);
    }
  }
}

template <int R, bool Nibbles, Scaling S, int Most>
static void int_tiles(ptrdiff_t tokens, const IntTile& tile) {
  if constexpr (Most > 1) {
    if (tokens < Most) return int_tiles<R, Nibbles, S, Most - 1>(tokens, tile);
  }
  int_tile<R, Most, Nibbles, S>(tile);
}

template <int R, bool Nibbles, int Most>
static void int_tiles(ptrdiff_t tokens, const IntTile& tile, Scaling s) {
  if (s == kByGroupWithMinimum) return int_tiles<R, Nibbles, kByGroupWithMinimum, Most>(tokens, tile);
  if (s == kByGroup) return int_tiles<R, Nibbles, kByGroup, Most>(tokens, tile);
  if constexpr (!Nibbles) int_tiles<R, Nibbles, kByRow, Most>(tokens, tile);
}

// ---- the product of R columns with all tokens ----

// The inputs of one step over all tokens: whole blocks.
INL ptrdiff_t span_of(const Packed& m) { return imax(kSpan / m.block, 1) * m.block; }

INL ptrdiff_t bytes_before(const Packed& m, ptrdiff_t inputs) { return inputs / m.block * m.block_bytes; }

// Inputs [k0, k0 + n) of a column as float32 lines: what "float" activations are multiplied with. The scale of a row,
// where there is one, comes at the end.
static void expand(const Packed& m, const uint8_t* column, ptrdiff_t k0, ptrdiff_t n, float* to) {
  const uint8_t* w = column + bytes_before(m, k0);
  if (m.format == kBf16) {
    for (ptrdiff_t k = 0; k < n; k += 2, w += 64) {
      for (int v = 0; v < V; ++v) {
        store(to + k * kLanes + v * W, load_first((const uint16_t*)w + v * W * 2));
        if (k + 1 < n) store(to + (k + 1) * kLanes + v * W, load_second((const uint16_t*)w + v * W * 2));
      }
    }
    return;
  }
  if (m.format == kFp16) {
    for (ptrdiff_t k = 0; k < n; ++k, w += 32) {
      for (int v = 0; v < V; ++v) store(to + k * kLanes + v * W, load_half(w + v * W * 2));
    }
    return;
  }
  const int per_line = m.bits == 4 ? 8 : 4;
  for (ptrdiff_t b = 0; b < n; b += m.block) {
    const ptrdiff_t inputs = imin(m.block, n - b), groups = m.group != 0 ? div_up(inputs, m.group) : 1;
    const uint8_t* const scales = w;
    w += header_bytes(m, inputs);
    for (ptrdiff_t k = 0; k < inputs; k += per_line, w += 64) {
      const ptrdiff_t g = m.group != 0 ? k / m.group : 0;
      for (int v = 0; v < V; ++v) {
        const vf scale = m.group != 0 ? load_half(scales + g * 32 + v * W * 2) : splat(1.0f);
        const vf least = m.minimum ? load_half(scales + (groups + g) * 32 + v * W * 2) : vf{};
        const vu codes = (vu)load_i(w + v * W * 4);
        for (int i = 0; i < per_line && k + i < inputs; ++i) {
          const vu code = m.bits == 8 ? (codes >> (8 * i)) & 255 : (codes >> (8 * (i % 4) + 4 * (i / 4))) & 15;
          const vf value = __builtin_convertvector((vi)code - m.offset, vf) * scale + least;
          store(to + (b + k + i) * kLanes + v * W, value);
        }
      }
    }
  }
}

// The blocks of inputs [k0, k0 + n) with every code in a byte of its own.
static void unpack_nibbles(const Packed& m, const uint8_t* column, ptrdiff_t k0, ptrdiff_t n, uint8_t* to) {
  const uint8_t* w = column + bytes_before(m, k0);
  for (ptrdiff_t b = 0; b < n; b += m.block) {
    const ptrdiff_t inputs = imin(m.block, n - b), header = header_bytes(m, inputs);
    __builtin_memcpy(to, w, (size_t)header);
    w += header;
    to += header;
    for (ptrdiff_t k = 0; k < inputs; k += 8, w += 64, to += 128) {
      for (int v = 0; v < V; ++v) {
        const vi codes = load_i(w + v * W * 4);
        const vi low = codes & 0x0f0f0f0f, high = (vi)((vu)codes >> 4) & 0x0f0f0f0f;
        __builtin_memcpy(to + v * W * 4, &low, sizeof low);
        __builtin_memcpy(to + 64 + v * W * 4, &high, sizeof high);
      }
    }
  }
}

constexpr size_t kScratchBytes = 2 * (kSpan + 256) * kLanes * sizeof(float);  // two columns' span, expanded

template <int R>
static void float_product(const Packed& m, const uint8_t* const (&columns)[2], const Inputs& in, float* c,
                          uint8_t* scratch) {
  constexpr int kMost = R == 2 ? (kPairTokens > 0 ? kPairTokens : 1) : kOneTokens;
  const bool few = in.tokens <= kFewTokens;
  const bool direct = m.format == kFp32 || (few && (m.format == kBf16 || m.format == kFp16));
  // float32 sums of a span are added to the total: rounding grows with the spans, not with the inputs
  const ptrdiff_t step = direct && m.format == kFp32 && !few ? 256 : span_of(m);
  const ptrdiff_t groups = div_up(in.tokens, kMost);
  for (ptrdiff_t k0 = 0; k0 < m.k; k0 += step) {
    const ptrdiff_t n = imin(step, m.k - k0);
    const uint8_t* at[2];
    for (int r = 0; r < R; ++r) {
      if (direct) {
        at[r] = columns[r] + k0 * kLanes * m.bits / 8;
      } else {
        float* const to = (float*)scratch + r * (kSpan + 256) * kLanes;
        expand(m, columns[r], k0, n, to);
        at[r] = (const uint8_t*)to;
      }
    }
    for (ptrdiff_t g = 0; g < groups; ++g) {
      const ptrdiff_t t0 = in.tokens * g / groups, T = in.tokens * (g + 1) / groups - t0;
      const float* const x = in.f + t0 * in.ld + k0;
      float* const to = c + t0 * R * kLanes;
      const bool ahead = few && g == 0;
      if (!direct || m.format == kFp32) {
        float_tiles<R, kFloats, kMost>(T, at, n, x, in.ld, to, R * kLanes, ahead && direct);
      } else if (m.format == kBf16) {
        float_tiles<R, kPairs, kMost>(T, at, n, x, in.ld, to, R * kLanes, ahead);
      } else {
        float_tiles<R, kHalves, kMost>(T, at, n, x, in.ld, to, R * kLanes, ahead);
      }
    }
  }
}

template <int R>
static void int_product(const Packed& m, const uint8_t* const (&columns)[2], const Inputs& in, float* c,
                        uint8_t* scratch) {
  constexpr int kMost = R == 2 ? (kIntPairTokens > 0 ? kIntPairTokens : 1) : kIntOneTokens;
  const bool nibbles = m.bits == 4, unpack = nibbles && in.tokens > 2 * kMost;
  const Scaling scaling = m.group == 0 ? kByRow : m.minimum ? kByGroupWithMinimum : kByGroup;
  const ptrdiff_t step = in.tokens <= kMost ? round_up(m.k, m.block) : span_of(m), groups = div_up(in.tokens, kMost);
  IntTile tile;
  tile.group = m.activation_group;
  tile.block = m.block;
  tile.header = header_bytes(m, m.block);
  tile.ldq = in.ld;
  tile.ldg = in.groups;
  tile.ldc = R * kLanes;
  for (ptrdiff_t k0 = 0; k0 < m.k; k0 += step) {
    tile.inputs = imin(step, m.k - k0);
    for (int r = 0; r < R; ++r) {
      tile.columns[r] = columns[r] + bytes_before(m, k0);
      if (unpack) {
        uint8_t* const to = scratch + (size_t)r * (kScratchBytes / 2);
        unpack_nibbles(m, columns[r], k0, tile.inputs, to);
        tile.columns[r] = to;
      }
    }
    for (ptrdiff_t g = 0; g < groups; ++g) {
      const ptrdiff_t t0 = in.tokens * g / groups, T = in.tokens * (g + 1) / groups - t0;
      const ptrdiff_t table = t0 * in.groups + k0 / m.activation_group;
      tile.q = in.q + t0 * in.ld + k0;
      tile.scale = in.scale + table;
      tile.start = in.start + table;
      tile.sum = in.sum + table;
      tile.c = c + t0 * tile.ldc;
      tile.ahead = !unpack && in.tokens <= kFewTokens && g == 0;
      if (nibbles && !unpack) {
        int_tiles<R, true, kMost>(T, tile, scaling);
      } else {
        int_tiles<R, false, kMost>(T, tile, scaling);
      }
    }
  }
}

// c [tokens][R * 16] = the outputs of R columns from `column` on, biases included. Rows beyond n give zeros.
template <int R>
static void product(const Packed& m, ptrdiff_t column, const Inputs& in, float* c, uint8_t* scratch) {
  const uint8_t* columns[2] = {m.columns + column * m.column_bytes, m.columns + (column + R - 1) * m.column_bytes};
  for (ptrdiff_t i = 0; i < in.tokens * R * kLanes; i += W) store(c + i, vf{});
  if (in.mode == kInt8Mode) {
    int_product<R>(m, columns, in, c, scratch);
  } else {
    float_product<R>(m, columns, in, c, scratch);
  }
  if (m.row_scale == nullptr && m.bias == nullptr) return;
  for (int i = 0; i < R * kLanes; i += W) {
    const ptrdiff_t n = column * kLanes + i;
    const vf scale = m.row_scale != nullptr ? load(m.row_scale + n) : splat(1.0f);
    const vf bias = m.bias == nullptr || n >= m.n ? vf{} : n + W <= m.n ? load(m.bias + n) : load_part(m.bias + n, m.n - n);
    for (ptrdiff_t t = 0; t < in.tokens; ++t) {
      float* const at = c + t * R * kLanes + i;
      store(at, load(at) * scale + bias);
    }
  }
}

// ---- the FFN ----

struct Plan {
  ptrdiff_t block;        // tokens of a pass
  ptrdiff_t chunk;        // channels of a task
  ptrdiff_t down_columns; // of a task
  bool pair;              // tiles of two columns
  Inputs x, m;            // x: what gate and up (or a lone down) multiply; m: the coefficients
  size_t shared, c_floats, each;
};

INL const Packed& first_matrix(const PackedCall& c) { return c.up.columns != nullptr ? c.up : c.down; }

// Results do not depend on the tasks' sizes, nor on the threads.
static Plan plan(const PackedCall& c, uintptr_t base) {
  Plan p = {};
  const ptrdiff_t blocks = div_up(c.tokens, kBlockTokens);
  p.block = div_up(c.tokens, blocks);
  p.pair = W == 16 && p.block > kFewTokens;
  size_t at = place_inputs(first_matrix(c), p.block, base, 0, &p.x);
  const bool whole = c.up.columns != nullptr;
  if (whole) {
    at = place_inputs(c.down, p.block, base, at, &p.m);
    // as few channels as whole groups allow, but enough tasks to balance the threads come first
    const ptrdiff_t unit = p.m.mode == kInt8Mode ? imax(c.down.activation_group, 2 * kLanes) : 2 * kLanes;
    p.chunk = imax(imin(div_up(c.up.n, 16 * (ptrdiff_t)c.threads) / unit, 256 / unit), 1) * unit;
  }
  const ptrdiff_t columns = div_up(c.down.n, kLanes);
  p.down_columns = round_up(imax(columns / (8 * (ptrdiff_t)c.threads), 1), p.pair ? 2 : 1);
  p.shared = at;
  p.c_floats = (size_t)(p.block * 2 * kLanes);
  p.each = line_up(kScratchBytes + (2 * p.c_floats + (size_t)(p.block * p.chunk)) * sizeof(float));
  return p;
}

struct PackedJob {
  const PackedCall* call;
  uint8_t* workspace;
  ptrdiff_t next[3];  // of inputs, up, down
  int odd;            // an activation was not finite
};

// The coefficients of channels [f0, f0 + chunk) of all tokens, made ready for down.
static bool up_task(const PackedCall& c, const Plan& p, ptrdiff_t tokens, ptrdiff_t f0, uint8_t* own) {
  float* const up = (float*)(own + kScratchBytes);
  float* const gate = up + p.c_floats;
  float* const rows = gate + p.c_floats;  // [tokens][chunk], for quantization
  const bool floats = p.m.mode == kFloatMode, gated = c.gate.columns != nullptr;
  Inputs x = p.x;
  x.tokens = tokens;
  const ptrdiff_t end = imin(f0 + p.chunk, round_up(c.up.n, kLanes));
  for (ptrdiff_t f = f0; f < end;) {
    const bool two = p.pair && f + kLanes < end;
    const ptrdiff_t width = two ? 2 * kLanes : kLanes, column = f / kLanes;
    if (two) {
      product<2>(c.up, column, x, up, own);
      if (gated) product<2>(c.gate, column, x, gate, own);
    } else {
      product<1>(c.up, column, x, up, own);
      if (gated) product<1>(c.gate, column, x, gate, own);
    }
    const float* const done = combine(c, gated, gate, up, tokens * width);
    const ptrdiff_t real = imin(width, c.up.n - f);  // beyond it act(0) need not be 0
    for (ptrdiff_t t = 0; t < tokens; ++t) {
      float* const to = floats ? p.m.f + t * p.m.ld + f : rows + t * p.chunk + (f - f0);
      for (ptrdiff_t i = 0; i < real; ++i) to[i] = done[t * width + i];
      for (ptrdiff_t i = real; i < width; ++i) to[i] = 0.0f;
    }
    f += width;
  }
  if (floats) return true;
  bool finite = true;
  const ptrdiff_t n = imin(p.chunk, c.up.n - f0), written = end - f0;
  for (ptrdiff_t t = 0; t < tokens; ++t) {
    float* const row = rows + t * p.chunk;
    for (ptrdiff_t i = written; i < p.chunk; ++i) row[i] = 0.0f;
    finite &= quantize_row(c.down, p.m, t, f0, n, row);
  }
  return finite;
}

static void down_task(const PackedCall& c, const Plan& p, const Inputs& in, ptrdiff_t first, ptrdiff_t column,
                      uint8_t* own) {
  float* const out = (float*)(own + kScratchBytes);
  const ptrdiff_t end = imin(column + p.down_columns, div_up(c.down.n, kLanes));
  while (column < end) {
    const bool two = p.pair && column + 1 < end;
    const ptrdiff_t width = two ? 2 * kLanes : kLanes, n0 = column * kLanes, n = imin(width, c.down.n - n0);
    if (two) {
      product<2>(c.down, column, in, out, own);
    } else {
      product<1>(c.down, column, in, out, own);
    }
    for (ptrdiff_t t = 0; t < in.tokens; ++t) {
      const float* const from = out + t * width;
      const ptrdiff_t at = (first + t) * c.y_stride + n0;
      if (c.y_dtype == kFloat32) {
        ptrdiff_t i = 0;
        for (; i + W <= n; i += W) put((float*)c.y + at + i, load(from + i));
        for (; i < n; ++i) put((float*)c.y + at + i, from[i]);
      } else {
        ptrdiff_t i = 0;
        for (; i + W <= n; i += W) put((uint16_t*)c.y + at + i, load(from + i));
        for (; i < n; ++i) put((uint16_t*)c.y + at + i, from[i]);
      }
    }
    column += two ? 2 : 1;
  }
}

void packed_body(int thread, int threads, void* arg) {
  PackedJob& job = *(PackedJob*)arg;
  const PackedCall& c = *job.call;
  const Plan p = plan(c, (uintptr_t)job.workspace);
  const Packed& head = first_matrix(c);
  const bool whole = c.up.columns != nullptr;
  uint8_t* const own = job.workspace + p.shared + p.each * (size_t)thread;
  bool finite = true;
  for (ptrdiff_t first = 0; first < c.tokens; first += p.block) {
    const ptrdiff_t tokens = imin(p.block, c.tokens - first);
    for (ptrdiff_t t; (t = take(job.next[0])) < tokens;) finite &= take_input(c, head, p.x, first, t);
    finish(job, 0, thread, threads);
    if (whole) {
      for (ptrdiff_t i; (i = take(job.next[1])) * p.chunk < c.up.n;) finite &= up_task(c, p, tokens, i * p.chunk, own);
      finish(job, 1, thread, threads);
    }
    Inputs in = whole ? p.m : p.x;
    in.tokens = tokens;
    const ptrdiff_t columns = div_up(c.down.n, kLanes);
    for (ptrdiff_t i; (i = take(job.next[2])) * p.down_columns < columns;) {
      down_task(c, p, in, first, i * p.down_columns, own);
    }
    if (first + p.block < c.tokens) finish(job, 2, thread, threads);
  }
  if (!finite) __atomic_store_n(&job.odd, 1, __ATOMIC_RELAXED);
}

size_t packed_workspace(const PackedCall& c) {
  const Plan p = plan(c, 0);
  return p.shared + p.each * (size_t)c.threads;
}

bool packed_run(const PackedCall& c, uint8_t* workspace) {
  PackedJob job = {&c, workspace, {0, 0, 0}, 0};
  parallel(c.threads, packed_body, &job);
  return job.odd == 0;
}
