// What the tokens bring to a matrix, laid out as the tiles read it. Included by packed_inl.h.

// kDotMode: bfloat16 pairs for the CPU's two-element dot products; kRowMode: bfloat16 rows for its matrix unit;
// kCodeRowMode: rows of codes for it.
enum Mode { kFloatMode, kInt8Mode, kDotMode, kRowMode, kCodeRowMode };
INL bool is_quantized(Mode mode) { return mode == kInt8Mode || mode == kCodeRowMode; }
INL bool is_by_rows(Mode mode) { return mode == kRowMode || mode == kCodeRowMode; }

// Tokens in even groups of at most `most`, as many as a tile holds. The numbers of a group of T tokens lie together:
// floats [k][T], bfloat16 pairs [k / 2][T][2], codes [k / 4][T][4] or, of 16 bits, [k / 4][2][T][2] (even and odd ones
// of four), what belongs to an activation group [group][T]. For the matrix unit they lie in rows [tokens][ld] instead,
// up to a multiple of kTileTokens, and what belongs to an activation group [group][pitch].
struct Inputs {
  Mode mode;
  ptrdiff_t tokens, most;
  ptrdiff_t ld, tables;  // inputs, activation groups of a token, padding included
  ptrdiff_t pitch;       // tokens, in kCodeRowMode
  float* f;
  uint16_t* b;           // bfloat16
  int8_t* q;             // codes
  ptrdiff_t code_bytes;  // 2 where they meet codes of 8 bits by pairs: see dot_inl.h
  float* scale;
  int32_t* start;        // - offset * sum of the codes: where an integer sum begins
  float* sum;            // scale * sum of the codes: what a minimum is multiplied with
  const int32_t* lines;  // of a lone token: the lines of a column whose inputs are not all zero; nullptr: take them all
  ptrdiff_t n_lines;

  ptrdiff_t groups() const { return (tokens + most - 1) / most; }
  ptrdiff_t begin(ptrdiff_t g, ptrdiff_t of) const { return tokens * g / of; }  // of: groups()
  // Where an activation group's entries of T tokens from t0 on begin, and how far the next group's are.
  ptrdiff_t entries(ptrdiff_t table, ptrdiff_t t0, ptrdiff_t T) const {
    return mode == kCodeRowMode ? table * pitch + t0 : t0 * tables + table * T;
  }
  ptrdiff_t next_entries(ptrdiff_t T) const { return mode == kCodeRowMode ? pitch : T; }
};

// bfloat16 products only where x is bfloat16 itself, or would be rounded to 8 bits. Groups of whole tiles stay integers
// on the matrix unit, from more tokens on than one integer tile takes (measured).
INL Mode mode_of(const Packed& m, bool narrow_x, ptrdiff_t tokens) {
#if defined(FANFOLD_AMX)
  if (m.format == kBf16 && narrow_x && tokens >= kTilesFrom) return kRowMode;
  if (m.int8_activations && m.activation_group % 64 == 0 && tokens > kIntPairTokens) return kCodeRowMode;
  if (m.is_integer() && (m.int8_activations || narrow_x) && tokens >= kTilesFromCodes) return kRowMode;
#elif defined(FANFOLD_BF16)
  if (m.format == kBf16 && narrow_x) return kDotMode;
#endif
  (void)narrow_x;
  (void)tokens;
  return m.int8_activations ? kInt8Mode : kFloatMode;
}

INL size_t line_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Lays the arrays of `tokens` tokens out from `at` on; returns what follows them.
INL size_t place_inputs(const Packed& m, ptrdiff_t tokens, Mode mode, bool pair, uintptr_t base, size_t at,
                        Inputs* in) {
  in->mode = mode;
  in->tokens = tokens;
  if (in->mode == kFloatMode) {
    in->most = pair ? kPairTokens : kOneTokens;
    in->ld = round_up(m.k, 16);
    in->f = (float*)(base + at);
    return at + line_up((size_t)(tokens * in->ld) * sizeof(float));
  }
  if (in->mode == kDotMode) {
    in->most = pair ? kPairTokens : kOneTokens;
    in->ld = round_up(m.k, 16);
    in->b = (uint16_t*)(base + at);
    return at + line_up((size_t)(tokens * in->ld) * sizeof(uint16_t));
  }
  if (in->mode == kRowMode) {
    in->most = kTileTokens;
    in->ld = round_up(m.k, 64) + 32;  // whole lines, and not all rows in the same cache sets
    in->b = (uint16_t*)(base + at);
    return at + line_up((size_t)(round_up(tokens, kTileTokens) * in->ld) * sizeof(uint16_t));
  }
  const int most_of_two = m.bits == 4 ? kSmallPairTokens : kIntPairTokens;
  in->most = mode == kCodeRowMode ? kTileTokens : pair ? most_of_two : kIntOneTokens;
  in->ld = round_up(m.k, 256);  // whole activation groups of every format
  in->tables = div_up(m.k, m.activation_group);
  if (mode == kCodeRowMode) {
    in->pitch = tokens = round_up(tokens, kTileTokens);
    in->ld += 64;  // not all rows in the same cache sets
  }
  const size_t table = line_up((size_t)(tokens * in->tables) * 4);
  in->q = (int8_t*)(base + at);
  in->code_bytes = kByPairs && m.bits == 8 ? 2 : 1;
  at += line_up((size_t)(tokens * in->ld * in->code_bytes));
  in->scale = (float*)(base + at);
  in->start = (int32_t*)(base + at + table);
  in->sum = (float*)(base + at + 2 * table);
  return at + 3 * table;
}

// round(a b) to nearest, ties to even, of the exact product: |a b| < 2^21.
INL vi rounded_product(vf a, float b) {
#if FANFOLD_W == 16
  return (vi)_mm512_fmadd_ps((__m512)a, (__m512)splat(b), (__m512)splat(0x1.8p23f)) - 0x4b400000;
#elif FANFOLD_W == 8
  return (vi)_mm256_fmadd_ps((__m256)a, (__m256)splat(b), (__m256)splat(0x1.8p23f)) - 0x4b400000;
#else
  Pair p = to_double(a);
  p.low = (p.low * (double)b + 0x1.8p52) - 0x1.8p52;
  p.high = (p.high * (double)b + 0x1.8p52) - 0x1.8p52;
  return __builtin_convertvector(to_float(p), vi);
#endif
}

typedef int8_t vc __attribute__((vector_size(W)));

// W codes of 16 bits, the even ones of each four before the odd ones.
template <int... I>
INL vh evens_first(vi codes, std::integer_sequence<int, I...>) {
  const vh narrow = __builtin_convertvector(codes, vh);
  return __builtin_shufflevector(narrow, narrow, (I / 4 * 4 + I % 4 / 2 + I % 2 * 2)...);
}

// The codes of one group of a token: round(v / scale), scale = max |v| / 127. They may take the place of v. Returns
// whether all of v are finite.
INL bool quantize_group(const float* v, ptrdiff_t n, int8_t* q, ptrdiff_t code_bytes, float* scale, int32_t* total) {
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
    __builtin_memset(q, 0, (size_t)(n * code_bytes));
    return false;
  }
  // 127 / most overflows for the smallest numbers: those are brought up first.
  const float lift = most < 0x1p-64f ? 0x1p64f : 1.0f;
  const float inverse = most > 0.0f ? 127.0f / (most * lift) : 0.0f;
  vi sum = splat_i(0);
  for (ptrdiff_t i = 0; i < n; i += W) {
    const vi code = rounded_product(load(v + i) * lift, inverse);
    sum += code;
    if (kByPairs && code_bytes == 2) {
      const vh wide = evens_first(code, std::make_integer_sequence<int, W>{});
      __builtin_memcpy(q + i * 2, &wide, sizeof wide);
    } else {
      const vc narrow = __builtin_convertvector(code, vc);
      __builtin_memcpy(q + i, &narrow, sizeof narrow);
    }
  }
  int32_t all = 0;
  for (int i = 0; i < W; ++i) all += sum[i];
  *total = all;
  return true;
}

// Inputs [k0, k0 + n) of token t0 + t of a group of T from t0 on, from floats padded with zeros to whole activation
// groups, where k0 begins one. Their codes take their place, 4 in a float's. Returns whether all are finite.
INL bool quantize_row(const Packed& m, const Inputs& in, ptrdiff_t t0, ptrdiff_t T, ptrdiff_t t, ptrdiff_t k0,
                      ptrdiff_t n, float* v) {
  bool finite = true;
  ptrdiff_t at = in.entries(k0 / m.activation_group, t0, T) + t;
  const ptrdiff_t next = in.next_entries(T);
  for (ptrdiff_t k = 0; k < n; k += m.activation_group, at += next) {
    int32_t total;
    finite &=
        quantize_group(v + k, m.activation_group, (int8_t*)v + k * in.code_bytes, in.code_bytes, in.scale + at, &total);
    in.start[at] = -m.offset * total;
    in.sum[at] = in.scale[at] * (float)total;
  }
  return finite;
}

#ifdef FANFOLD_BF16
// A bfloat16 that meets products of the CPU's, which take subnormal numbers for zero, as does the conversion.
struct Narrow {
  uint16_t bits;
};
INL void put(Narrow* to, vf v) {
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
  __builtin_memcpy(to, &narrow, sizeof narrow);
}
#endif

// n floats rounded to bfloat16, which may take their place. n is a multiple of 16.
INL void narrow_row(const float* v, ptrdiff_t n, uint16_t* to) {
#ifdef FANFOLD_BF16
  for (ptrdiff_t k = 0; k < n; k += W) put((Narrow*)to + k, load(v + k));
#else
  (void)v, (void)n, (void)to;  // no mode wants it
#endif
}

// to[k * T + t] = rows[t * pitch + k]: n elements of 32 bits, whatever they are, of each of T <= W tokens.
static void interleave(const float* rows, ptrdiff_t pitch, ptrdiff_t T, ptrdiff_t n, float* to) {
  if (T == 1) {
    __builtin_memcpy(to, rows, (size_t)n * sizeof(float));
    return;
  }
  for (ptrdiff_t k = 0; k < n; k += W) {
    const ptrdiff_t count = imin(W, n - k);
    vf v[W];
#pragma GCC unroll 16
    for (ptrdiff_t t = 0; t < W; ++t) {
      const float* const from = rows + imin(t, T - 1) * pitch + k;
      v[t] = count == W ? load(from) : load_part(from, count);
    }
    transpose(v);
    // Whole vectors, of which the next ones put right what is behind T; the last ones of all in part.
#pragma GCC unroll 16
    for (ptrdiff_t i = 0; i < W; ++i) {
      if (i == count) break;
      float* const at = to + (k + i) * T;
      if ((n - k - i) * T >= W) {
        store(at, v[i]);
      } else {
        __builtin_memcpy(at, &v[i], (size_t)T * sizeof(float));
      }
    }
  }
}

// Asks for the lines that put_group will write: the other thread has read them, and a store that must take them from it
// takes as long as the coefficients themselves.
INL void ask_to_put(const Inputs& in, ptrdiff_t t0, ptrdiff_t T, ptrdiff_t k0, ptrdiff_t n) {
#if FANFOLD_W == 8  // measured there
  if (is_by_rows(in.mode)) return;
  const ptrdiff_t size = in.mode == kFloatMode ? 4 : in.mode == kDotMode ? 2 : in.code_bytes;
  const uintptr_t array = in.mode == kFloatMode ? (uintptr_t)in.f
                          : in.mode == kDotMode ? (uintptr_t)in.b
                                                : (uintptr_t)in.q;
  const uintptr_t at = array + (uintptr_t)((t0 * in.ld + k0 * T) * size);
  for (uintptr_t line = at; line < at + (uintptr_t)(n * T * size); line += 64) {
    asm volatile("prefetchw %0" ::"m"(*(const uint8_t*)line));  // where a CPU lacks it, it does nothing
  }
#else
  (void)in, (void)t0, (void)T, (void)k0, (void)n;
#endif
}

// Inputs [k0, k0 + n) of a group of T tokens from t0 on made ready, from rows of floats with zeros up to `padded` and
// to whole activation groups. The rows are written over. Returns whether they could be.
INL bool put_group(const Packed& m, const Inputs& in, ptrdiff_t t0, ptrdiff_t T, ptrdiff_t k0, ptrdiff_t n,
                   ptrdiff_t padded, float* rows, ptrdiff_t pitch) {
  bool finite = true;
  for (ptrdiff_t t = 0; t < T && in.mode != kFloatMode; ++t) {
    float* const row = rows + t * pitch;
    if (is_quantized(in.mode)) finite &= quantize_row(m, in, t0, T, t, k0, n, row);
    if (in.mode == kDotMode) narrow_row(row, padded, (uint16_t*)row);
    if (in.mode == kRowMode) narrow_row(row, padded, in.b + (t0 + t) * in.ld + k0);
    if (in.mode == kCodeRowMode) {
      __builtin_memcpy(in.q + (t0 + t) * in.ld + k0, row, (size_t)round_up(n, m.activation_group));
    }
  }
  if (in.mode == kFloatMode) interleave(rows, pitch, T, padded, in.f + t0 * in.ld + k0 * T);
  if (in.mode == kDotMode) interleave(rows, pitch, T, padded / 2, (float*)(in.b + t0 * in.ld + k0 * T));
  if (in.mode == kInt8Mode) {
    interleave(rows, pitch, T, round_up(n, m.activation_group) / 4 * in.code_bytes,
               (float*)(in.q + (t0 * in.ld + k0 * T) * in.code_bytes));
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

constexpr ptrdiff_t kRowPart = 256;  // inputs of a task; a multiple of every activation group

INL ptrdiff_t input_tasks(const Packed& m, const Inputs& in) { return in.groups() * div_up(m.k, kRowPart); }

// Prepares some inputs of a group of the tokens of the call's block that begins at token `first`: what two threads
// write shares no line. Returns whether all that had to be is finite.
static bool take_inputs(const PackedCall& c, const Packed& m, const Inputs& in, ptrdiff_t first, ptrdiff_t task) {
  constexpr ptrdiff_t kPitch = kRowPart + 16;
  float rows[kTileTokens * kPitch];
  const ptrdiff_t parts = div_up(m.k, kRowPart), g = task / parts, k = task % parts * kRowPart;
  const ptrdiff_t groups = in.groups(), t0 = in.begin(g, groups), T = in.begin(g + 1, groups) - t0;
  const ptrdiff_t n = imin(kRowPart, m.k - k);
  // quantized: whole groups; else only what no other thread fills (zero_rows)
  const ptrdiff_t padded = is_quantized(in.mode) ? kRowPart : round_up(n, 16);
  for (ptrdiff_t t = 0; t < T; ++t) {
    const ptrdiff_t at = (first + t0 + t) * c.x_stride + k;
    float* const row = rows + t * kPitch;
    if (c.x_dtype == kFloat32) {
      widen_row((const float*)c.x + at, n, row, padded);
    } else {
      widen_row((const uint16_t*)c.x + at, n, row, padded);
    }
  }
  return put_group(m, in, t0, T, k, n, padded, rows, kPitch);
}
