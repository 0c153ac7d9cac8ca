// The matrix unit (AMX): tiles of 16 rows of 32 bfloat16 inputs or 64 codes. Included by packed_inl.h.

#ifndef FANFOLD_AMX
struct TileUnit {
  explicit TileUnit(bool) {}
};
INL void zero_rows(const Inputs&, ptrdiff_t) {}
#else
constexpr ptrdiff_t kTileInputs = 32;
constexpr ptrdiff_t kTileCodes = 64;

// Sets the unit up for a thread's part of a call: eight tiles of 16 rows of 64 bytes.
class TileUnit {
 public:
  explicit TileUnit(bool used) : used_(used) {
    if (!used) return;
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    const Config config;
    asm volatile("" : : "r"(&config) : "memory");  // gcc takes the intrinsic to read its first 8 bytes only
    _tile_loadconfig(&config);
  }
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;
  ~TileUnit() {
    if (used_) _tile_release();
  }

 private:
  bool used_;
};

// What tiles read but no token writes: inputs behind the last of `k`, rows behind the last token. Of rows of codes it
// is enough that their scales and sums are normal numbers: others cost time.
INL void zero_rows(const Inputs& in, ptrdiff_t k) {
  for (ptrdiff_t g = 0; g < in.tables && in.mode == kCodeRowMode; ++g) {
    for (ptrdiff_t t = in.tokens; t < in.pitch; ++t) in.scale[g * in.pitch + t] = in.sum[g * in.pitch + t] = 0.0f;
  }
  if (in.mode != kRowMode) return;
  const ptrdiff_t behind = round_up(k, 16), rows = round_up(in.tokens, kTileTokens);
  for (ptrdiff_t t = 0; t < rows; ++t) {
    const ptrdiff_t from = t < in.tokens ? behind : 0;
    __builtin_memset(in.b + t * in.ld + from, 0, (size_t)(in.ld - from) * sizeof(uint16_t));
  }
}

// Memory asked for meanwhile: `step` bytes of each column for each step of a tile.
struct RowHint {
  uintptr_t at;
  ptrdiff_t step, pitch;
  int columns;
  void ask() {
    for (ptrdiff_t i = 0; i < step; i += 64) {
      for (int r = 0; r < columns; ++r) __builtin_prefetch((const void*)(at + (uintptr_t)(r * pitch + i)), 0, 2);
    }
    at += (uintptr_t)step;
  }
};

// c[t * ldc + r * 16 + lane] += n inputs (in whole tiles, zeros behind them) of R columns and kTileTokens tokens; = if
// `fresh`. Two: tokens beyond the first 16 exist.
template <int R, bool Two>
INL void row_tile(const uint8_t* const (&columns)[2], ptrdiff_t n, const uint16_t* x, ptrdiff_t ld, float* c,
                  ptrdiff_t ldc, bool fresh, RowHint* hint) {
  const size_t c_pitch = (size_t)ldc * sizeof(float), x_pitch = (size_t)ld * sizeof(uint16_t);
  if (fresh) {
    _tile_zero(0);
    if constexpr (Two) _tile_zero(2);
    if constexpr (R == 2) _tile_zero(1);
    if constexpr (R == 2 && Two) _tile_zero(3);
  } else {
    _tile_loadd(0, c, c_pitch);
    if constexpr (Two) _tile_loadd(2, c + 16 * ldc, c_pitch);
    if constexpr (R == 2) _tile_loadd(1, c + kLanes, c_pitch);
    if constexpr (R == 2 && Two) _tile_loadd(3, c + 16 * ldc + kLanes, c_pitch);
  }
  for (ptrdiff_t k = 0; k < n; k += kTileInputs) {
    _tile_loadd(4, x + k, x_pitch);
    _tile_loadd(6, columns[0] + k * 32, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Two) {
      _tile_loadd(5, x + 16 * ld + k, x_pitch);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (R == 2) {
      _tile_loadd(7, columns[1] + k * 32, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R == 2 && Two) _tile_dpbf16ps(3, 5, 7);
    hint->ask();
  }
  _tile_stored(0, c, c_pitch);
  if constexpr (Two) _tile_stored(2, c + 16 * ldc, c_pitch);
  if constexpr (R == 2) _tile_stored(1, c + kLanes, c_pitch);
  if constexpr (R == 2 && Two) _tile_stored(3, c + 16 * ldc + kLanes, c_pitch);
}

// Integer sums of up to four tiles that wait to be scaled and added to c, so that the matrix unit goes on meanwhile: of
// 16 tokens and a column each, the columns of the first 16 tokens before those of the next.
struct Waiting {
  const uint8_t* sums = nullptr;  // [tiles][16][16] int32
  int tiles = 0, done = 0;
  const float *scale = nullptr, *sum = nullptr;  // [tokens], see Inputs
  const int32_t* start = nullptr;
  const uint8_t *scales[2] = {}, *minima[2] = {};  // [16] float16 of each column, of its group
  float* c = nullptr;
};

// The next of its R columns' tiles.
template <int R, Scaling S>
INL void settle(Waiting* w, ptrdiff_t ldc) {
  const int first = w->done / R * 16, r = w->done % R;
  const uint8_t* const sums = w->sums + w->done * 1024;
  float* const c = w->c + first * ldc + r * kLanes;
  const vf scale = S == kByRow ? vf{} : load_half(w->scales[r]);
  const vf least = S == kByGroupWithMinimum ? load_half(w->minima[r]) : vf{};
  for (int t = 0; t < 16; ++t) {
    // a minimum takes the place of an offset
    const vi codes = S == kByGroupWithMinimum ? load_i(sums + t * 64) : load_i(sums + t * 64) + w->start[first + t];
    const vf value = __builtin_convertvector(codes, vf);
    vf total = load(c + t * ldc);
    if constexpr (S == kByGroupWithMinimum) total += least * w->sum[first + t];
    total += S == kByRow ? value * w->scale[first + t] : value * scale * w->scale[first + t];
    store(c + t * ldc, total);
  }
  ++w->done;
}

// An activation group of up to two columns: whole tiles of codes, and their scales and minima.
struct CodeGroup {
  const uint8_t *codes[2], *scales[2], *minima[2];
  ptrdiff_t k, steps, table;
};

// One group's sums with up to kTileTokens tokens; meanwhile `waiting` is settled, then these sums wait, in `room`.
template <int R, Scaling S, bool Two>
INL void code_tile(const CodeGroup& group, const int8_t* x, ptrdiff_t ld, ptrdiff_t ldc, uint8_t* room,
                   Waiting* waiting, RowHint* hint) {
  _tile_zero(0);
  if constexpr (R == 2) _tile_zero(1);
  if constexpr (Two) _tile_zero(2);
  if constexpr (R == 2 && Two) _tile_zero(3);
  const int8_t* at = x + group.k;
  const uint8_t *first = group.codes[0], *second = group.codes[R - 1];
  for (ptrdiff_t i = 0; i < group.steps; ++i, at += kTileCodes, first += 1024, second += 1024) {
    _tile_loadd(4, at, (size_t)ld);
    _tile_loadd(6, first, 64);
    _tile_dpbsud(0, 4, 6);
    if constexpr (Two) {
      _tile_loadd(5, at + 16 * ld, (size_t)ld);
      _tile_dpbsud(2, 5, 6);
    }
    if constexpr (R == 2) {
      _tile_loadd(7, second, 64);
      _tile_dpbsud(1, 4, 7);
    }
    if constexpr (R == 2 && Two) _tile_dpbsud(3, 5, 7);
    hint->ask();
    if (waiting->done < waiting->tiles) settle<R, S>(waiting, ldc);
  }
  while (waiting->done < waiting->tiles) settle<R, S>(waiting, ldc);
  _tile_stored(0, room, 64);
  if constexpr (R == 2) _tile_stored(1, room + 1024, 64);
  if constexpr (Two) _tile_stored(2, room + R * 1024, 64);
  if constexpr (R == 2 && Two) _tile_stored(3, room + 3 * 1024, 64);
}

// Two float32 vectors, of an even input and the next, as bfloat16 pairs: to nearest, ties to even.
INL vi narrow_pair(vf even, vf odd) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return (vi)_mm512_permutexvar_epi16(_mm512_load_si512(order), both);
}
// The same of numbers that bfloat16 holds exactly.
INL vi exact_pair(vf even, vf odd) { return (vi)(((vu)even >> 16) | ((vu)odd & 0xffff0000u)); }

// A line's codes (4 or 8 inputs) as bfloat16 pairs of code * scale + least.
template <int Bits, bool ByRow>
INL void narrow_line(const uint8_t* w, uint16_t* to, int offset, vf scale, vf least) {
  const vu codes = (vu)load_i(w), mask = vu{} + (Bits == 8 ? 255u : 15u);
#pragma GCC unroll 4
  for (int i = 0; i < 16 / Bits; ++i) {  // pairs of inputs
    const int shift = Bits == 8 ? 16 * i : 16 * (i % 2) + 4 * (i / 2);
    const vi even = (vi)((codes >> shift) & mask), odd = (vi)((codes >> (shift + 8)) & mask);
    vi pair;
    if constexpr (ByRow) {
      pair = exact_pair(__builtin_convertvector(even - offset, vf), __builtin_convertvector(odd - offset, vf));
    } else {
      pair = narrow_pair(__builtin_convertvector(even, vf) * scale + least,
                         __builtin_convertvector(odd, vf) * scale + least);
    }
    __builtin_memcpy(to + 2 * i * kLanes, &pair, sizeof pair);
  }
}

// Inputs [k0, k0 + n) of a column of integer codes as bfloat16 pairs, zeros up to a whole tile. The scale of a row
// comes at the end, so that those numbers are exact.
template <int Bits, bool ByRow>
static void narrow_codes(const Packed& m, const uint8_t* column, ptrdiff_t k0, ptrdiff_t n, uint16_t* to) {
  const uint8_t* w = column + bytes_before(m, k0);
  constexpr int per_line = 32 / Bits;
  for (ptrdiff_t b = 0; b < n; b += m.block) {
    const ptrdiff_t inputs = imin(m.block, n - b), group = ByRow ? inputs : m.group, groups = div_up(inputs, group);
    const uint8_t* const scales = w;
    w += header_bytes(m, inputs);
    uint16_t* out = to + b * kLanes;
    for (ptrdiff_t g = 0; g < groups; ++g) {
      const vf scale = ByRow ? vf{} : load_half(scales + g * 32);
      // the offset is a power of two: its product with the scale is exact
      const vf least = m.minimum ? load_half(scales + (groups + g) * 32) : scale * (float)-m.offset;
      const ptrdiff_t end = imin(group, inputs - g * group);
      for (ptrdiff_t k = 0; k < end; k += per_line, w += 64, out += per_line * kLanes) {
        narrow_line<Bits, ByRow>(w, out, m.offset, scale, least);
      }
    }
  }
  const ptrdiff_t written = round_up(n, per_line), wanted = round_up(n, kTileInputs);
  __builtin_memset(to + written * kLanes, 0, (size_t)((wanted - written) * kLanes) * sizeof(uint16_t));
}

static void narrow(const Packed& m, const uint8_t* column, ptrdiff_t k0, ptrdiff_t n, uint16_t* to) {
  if (m.bits == 4) return narrow_codes<4, false>(m, column, k0, n, to);
  if (m.group == 0) return narrow_codes<8, true>(m, column, k0, n, to);
  narrow_codes<8, false>(m, column, k0, n, to);
}
#endif
