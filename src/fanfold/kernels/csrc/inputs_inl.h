// What the tokens bring to a matrix, laid out as the tiles read it. Included by packed_inl.h.

// kDotMode: bfloat16 pairs for the CPU's two-element dot products; kRowMode: bfloat16 rows for its matrix unit.
enum Mode { kFloatMode, kInt8Mode, kDotMode, kRowMode };

// Tokens in even groups of at most `most`, as many as a tile holds. The numbers of a group of T tokens lie together:
// floats [k][T], bfloat16 pairs [k / 2][T][2], codes [k / 4][T][4], what belongs to an activation group [group][T].
// In kRowMode they lie in rows [tokens][ld] instead, with rows of zeros up to a multiple of kTileTokens.
struct Inputs {
  Mode mode;
  ptrdiff_t tokens, most;
  ptrdiff_t ld, tables;  // inputs, activation groups of a token, padding included
  float* f;
  uint16_t* b;  // bfloat16
  int8_t* q;
  float* scale;
  int32_t* start;        // - offset * sum of the codes: where an integer sum begins
  float* sum;            // scale * sum of the codes: what a minimum is multiplied with
  const int32_t* lines;  // of a lone token: the lines of a column whose inputs are not all zero; nullptr: take them all
  ptrdiff_t n_lines;

  ptrdiff_t groups() const { return (tokens + most - 1) / most; }
  ptrdiff_t begin(ptrdiff_t g) const { return tokens * g / groups(); }
  ptrdiff_t group_of(ptrdiff_t t) const { return ((t + 1) * groups() - 1) / tokens; }
};

// bfloat16 products only where x is bfloat16 itself, or would be rounded to 8 bits.
INL Mode mode_of(const Packed& m, bool narrow_x, ptrdiff_t tokens) {
#if defined(FANFOLD_AMX)
  if (m.format == kBf16 && narrow_x && tokens >= kTilesFrom) return kRowMode;
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
  in->most = pair ? kIntPairTokens : kIntOneTokens;
  in->ld = round_up(m.k, 256);  // whole activation groups of every format
  in->tables = div_up(m.k, m.activation_group);
  const size_t table = line_up((size_t)(tokens * in->tables) * 4);
  in->q = (int8_t*)(base + at);
  at += line_up((size_t)(tokens * in->ld));
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

// One group of a token, 4 codes each pitch * 4 bytes: codes = round(v / scale), scale = max |v| / 127. Returns whether
// all of v are finite.
INL bool quantize_group(const float* v, ptrdiff_t n, int8_t* q, ptrdiff_t pitch, float* scale, int32_t* total) {
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
    for (ptrdiff_t i = 0; i < n; i += 4) __builtin_memset(q + i * pitch, 0, 4);
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
    for (int j = 0; j < W; j += 4) __builtin_memcpy(q + (i + j) * pitch, (const char*)&narrow + j, 4);
  }
  int32_t all = 0;
  for (int i = 0; i < W; ++i) all += sum[i];
  *total = all;
  return true;
}

// Inputs [k0, k0 + n) of token t, from floats padded with zeros to whole activation groups, where k0 begins one.
// Returns whether all are finite.
INL bool quantize_row(const Packed& m, const Inputs& in, ptrdiff_t t, ptrdiff_t k0, ptrdiff_t n, const float* v) {
  const ptrdiff_t g = in.group_of(t), t0 = in.begin(g), T = in.begin(g + 1) - t0;
  int8_t* const q = in.q + t0 * in.ld + (t - t0) * 4;
  bool finite = true;
  for (ptrdiff_t k = 0; k < n; k += m.activation_group) {
    int32_t total;
    const ptrdiff_t at = t0 * in.tables + (k0 + k) / m.activation_group * T + (t - t0);
    finite &= quantize_group(v + k, m.activation_group, q + (k0 + k) * T, T, in.scale + at, &total);
    in.start[at] = -m.offset * total;
    in.sum[at] = in.scale[at] * (float)total;
  }
  return finite;
}

INL void put_floats(const Inputs& in, ptrdiff_t t, ptrdiff_t k0, ptrdiff_t n, const float* v) {
  const ptrdiff_t g = in.group_of(t), t0 = in.begin(g), T = in.begin(g + 1) - t0;
  float* const to = in.f + t0 * in.ld + k0 * T + (t - t0);
  if (T == 1) {
    __builtin_memcpy(to, v, (size_t)n * sizeof(float));
  } else {
    for (ptrdiff_t k = 0; k < n; ++k) to[k * T] = v[k];
  }
}

// As put_floats, rounded to bfloat16. n is a multiple of 16.
INL void put_narrow(const Inputs& in, ptrdiff_t t, ptrdiff_t k0, ptrdiff_t n, const float* v) {
  if (in.mode == kRowMode) {
    for (ptrdiff_t k = 0; k < n; k += W) put(in.b + t * in.ld + k0 + k, load(v + k));
    return;
  }
  const ptrdiff_t g = in.group_of(t), t0 = in.begin(g), T = in.begin(g + 1) - t0;
  uint16_t* const to = in.b + t0 * in.ld + k0 * T + (t - t0) * 2;
  for (ptrdiff_t k = 0; k < n; k += W) {
    const vh h = to_bf16(load(v + k));
    for (int i = 0; i < W; i += 2) __builtin_memcpy(to + (k + i) * T, (const uint16_t*)&h + i, 4);
  }
}

// Inputs [k0, k0 + n) of token t made ready, from floats with zeros up to `padded` and to whole activation groups.
// Returns whether they could be.
INL bool put_inputs(const Packed& m, const Inputs& in, ptrdiff_t t, ptrdiff_t k0, ptrdiff_t n, ptrdiff_t padded,
                    const float* v) {
  if (in.mode == kInt8Mode) return quantize_row(m, in, t, k0, n, v);
  if (in.mode == kFloatMode) {
    put_floats(in, t, k0, padded, v);
  } else {
    put_narrow(in, t, k0, padded, v);
  }
  return true;
}

template <class XT>
INL void widen_row(const XT* from, ptrdiff_t n, float* to, ptrdiff_t padded) {
  ptrdiff_t k = 0;
  for (; k + W <= n; k += W) store(to + k, load(from + k));
  for (; k < n; ++k) to[k] = widen(from[k]);
  for (; k < padded; ++k) to[k] = 0.0f;
}

constexpr ptrdiff_t kRowPart = 1024;  // inputs converted at a time; a multiple of every group

// Prepares token `t` of the call's block that begins at token `first`. Returns whether all that had to be is finite.
static bool take_input(const PackedCall& c, const Packed& m, const Inputs& in, ptrdiff_t first, ptrdiff_t t) {
  const ptrdiff_t at = (first + t) * c.x_stride;
  bool finite = true;
  float part[kRowPart];
  for (ptrdiff_t k = 0; k < m.k; k += kRowPart) {
    const ptrdiff_t n = imin(kRowPart, m.k - k);
    // quantized: whole groups; else only what no other thread fills (zero_rows, in kRowMode)
    const ptrdiff_t padded = in.mode == kInt8Mode ? imin(kRowPart, in.ld - k) : round_up(n, 16);
    if (c.x_dtype == kFloat32) {
      widen_row((const float*)c.x + at + k, n, part, padded);
    } else {
      widen_row((const uint16_t*)c.x + at + k, n, part, padded);
    }
    finite &= put_inputs(m, in, t, k, n, padded, part);
  }
  return finite;
}
