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

// Memory asked for meanwhile: of each of the `columns` columns from `next` on as much as inputs [k0, k0 + n) are, a
// share with each step of a tile of `inputs` inputs.
struct RowHint {
  RowHint(const Packed& m, const uint8_t* next, ptrdiff_t k0, ptrdiff_t n, ptrdiff_t tokens, ptrdiff_t inputs)
      : at((uintptr_t)next),
        step((bytes_before(m, k0 + n) - bytes_before(m, k0)) / (div_up(tokens, kTileTokens) * div_up(n, inputs))),
        pitch(m.column_bytes) {}
  void ask() {
    for (ptrdiff_t i = 0; i < step; i += 64) {
      for (int r = 0; r < 2; ++r) __builtin_prefetch((const void*)(at + (uintptr_t)(r * pitch + i)), 0, 2);
    }
    at += (uintptr_t)step;
  }

 private:
  uintptr_t at;
  ptrdiff_t step, pitch;
};

// c[t * ldc + r * 16 + lane] += n inputs (in whole tiles, zeros behind them) of two columns and kTileTokens tokens; =
// if `fresh`. Two: tokens beyond the first 16 exist. Before each of the columns' tiles is read, `before` is called, and
// once more: it makes that tile while the matrix unit is at the last one.
template <bool Two, class Before>
INL void row_tile(const uint8_t* const (&columns)[2], ptrdiff_t n, const uint16_t* x, ptrdiff_t ld, float* c,
                  ptrdiff_t ldc, bool fresh, RowHint* hint, Before before) {
  before();
  const size_t c_pitch = (size_t)ldc * sizeof(float), x_pitch = (size_t)ld * sizeof(uint16_t);
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Two) _tile_zero(2);
    if constexpr (Two) _tile_zero(3);
  } else {
    _tile_loadd(0, c, c_pitch);
    _tile_loadd(1, c + kLanes, c_pitch);
    if constexpr (Two) _tile_loadd(2, c + 16 * ldc, c_pitch);
    if constexpr (Two) _tile_loadd(3, c + 16 * ldc + kLanes, c_pitch);
  }
  for (ptrdiff_t k = 0; k < n; k += kTileInputs) {
    before();
    _tile_loadd(4, x + k, x_pitch);
    _tile_loadd(6, columns[0] + k * 32, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Two) {
      _tile_loadd(5, x + 16 * ld + k, x_pitch);
      _tile_dpbf16ps(2, 5, 6);
    }
    _tile_loadd(7, columns[1] + k * 32, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (Two) _tile_dpbf16ps(3, 5, 7);
    hint->ask();
  }
  _tile_stored(0, c, c_pitch);
  _tile_stored(1, c + kLanes, c_pitch);
  if constexpr (Two) _tile_stored(2, c + 16 * ldc, c_pitch);
  if constexpr (Two) _tile_stored(3, c + 16 * ldc + kLanes, c_pitch);
}

// Integer sums of up to four tiles that wait to be scaled and added to c, so that the matrix unit goes on meanwhile: of
// 16 tokens and a column each, both columns of the first 16 tokens before those of the next.
struct Waiting {
  const uint8_t* sums = nullptr;  // [tiles][16][16] int32
  int tiles = 0, done = 0;
  const float *scale = nullptr, *sum = nullptr;  // [tokens], see Inputs
  const int32_t* start = nullptr;
  const uint8_t *scales[2] = {}, *minima[2] = {};  // [16] float16 of each column, of its group
  float* c = nullptr;
};

// The next of its tiles.
template <Scaling S>
INL void settle(Waiting* w, ptrdiff_t ldc) {
  const int first = w->done / 2 * 16, r = w->done % 2;
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

// An activation group of two columns: whole tiles of codes, and their scales and minima.
struct CodeGroup {
  const uint8_t *codes[2], *scales[2], *minima[2];
  ptrdiff_t k, steps, table;
};

// One group's sums with up to kTileTokens tokens; meanwhile `waiting` is settled, then these sums wait, in `room`.
template <Scaling S, bool Two>
INL void code_tile(const CodeGroup& group, const int8_t* x, ptrdiff_t ld, ptrdiff_t ldc, uint8_t* room,
                   Waiting* waiting, RowHint* hint) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Two) _tile_zero(2);
  if constexpr (Two) _tile_zero(3);
  const int8_t* at = x + group.k;
  const uint8_t *first = group.codes[0], *second = group.codes[1];
  for (ptrdiff_t i = 0; i < group.steps; ++i, at += kTileCodes, first += 1024, second += 1024) {
    _tile_loadd(4, at, (size_t)ld);
    _tile_loadd(6, first, 64);
    _tile_dpbsud(0, 4, 6);
    if constexpr (Two) {
      _tile_loadd(5, at + 16 * ld, (size_t)ld);
      _tile_dpbsud(2, 5, 6);
    }
    _tile_loadd(7, second, 64);
    _tile_dpbsud(1, 4, 7);
    if constexpr (Two) _tile_dpbsud(3, 5, 7);
    hint->ask();
    if (waiting->done < waiting->tiles) settle<S>(waiting, ldc);
  }
  while (waiting->done < waiting->tiles) settle<S>(waiting, ldc);
  _tile_stored(0, room, 64);
  _tile_stored(1, room + 1024, 64);
  if constexpr (Two) _tile_stored(2, room + 2 * 1024, 64);
  if constexpr (Two) _tile_stored(3, room + 3 * 1024, 64);
}

// Two float32 vectors, of an even input and the next, as bfloat16 pairs: to nearest, ties away from zero. A NaN must be
// the usual one.
INL vi narrow_pair(vf even, vf odd) { return (vi)((((vu)even + 0x8000u) >> 16) | (((vu)odd + 0x8000u) & 0xffff0000u)); }
// The same of numbers that bfloat16 holds exactly.
INL vi exact_pair(vf even, vf odd) { return (vi)(((vu)even >> 16) | ((vu)odd & 0xffff0000u)); }
INL vf usual_nan(vf v) { return v == v ? v : splat(__builtin_nanf("")); }
INL void put_pair(uint16_t* to, vi pair) { __builtin_memcpy(to, &pair, sizeof pair); }

// A line's codes (8 or 4 inputs) as bfloat16 pairs of code * scale + least, or of code + least where a row has one
// scale. A code is moved to where it counts as one in the fraction of 2^e, which takes no conversion: `low` is least -
// 2^e * scale. Its own rounding is 2^-13 of a scale at most.
struct Lift {
  vf scale, low, lower;
};
INL vf lifted(vu codes, vu mask, vu power, vf scale, vf low) { return (vf)((codes & mask) | power) * scale + low; }

template <int Bits, bool ByRow>
INL Lift lift(vf scale, vf least) {
  if constexpr (ByRow) return {vf{}, least - 0x1p8f, vf{}};
  if constexpr (Bits == 8) return {scale, least - scale * 0x1p8f, vf{}};
  return {scale, least - scale * 0x1p7f, least - scale * 0x1p11f};
}

template <int Bits, bool ByRow>
INL void narrow_line(const uint8_t* w, uint16_t* to, const Lift& l) {
  const vu codes = (vu)load_i(w);
  if constexpr (Bits == 8) {
    const vu mask = vu{} + (255u << 15), power = vu{} + 0x43800000u;  // 2^8: the fraction's bit 15 counts 1
    const vu in[4] = {codes << 15, codes << 7, codes >> 1, codes >> 9};
    for (int i = 0; i < 4; i += 2) {
      if constexpr (ByRow) {
        put_pair(to + i * kLanes,
                 exact_pair((vf)((in[i] & mask) | power) + l.low, (vf)((in[i + 1] & mask) | power) + l.low));
      } else {
        put_pair(to + i * kLanes, narrow_pair(lifted(in[i], mask, power, l.scale, l.low),
                                              lifted(in[i + 1], mask, power, l.scale, l.low)));
      }
    }
  } else {
    const vu high = vu{} + (15u << 16), high_power = vu{} + 0x43000000u;  // 2^7
    const vu low = vu{} + (15u << 12), low_power = vu{} + 0x45000000u;    // 2^11
    const vu in[4] = {codes << 16, codes << 8, codes, codes >> 8}, last = codes >> 16;
    vf v[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) v[i] = lifted(in[i], high, high_power, l.scale, l.low);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) v[4 + i] = lifted(i < 3 ? in[i + 1] : last, low, low_power, l.scale, l.lower);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) put_pair(to + i * kLanes, narrow_pair(v[i], v[i + 1]));
  }
}

// The tiles of a span of two columns of codes as bfloat16, one after the other. The scale of a row comes at the end, so
// that those numbers are exact.
template <int Bits, bool ByRow>
class Narrowing {
 public:
  // Inputs [k0, k0 + n) of a column and of that `pitch` bytes on; the tiles of the second lie `apart` behind those of
  // the first.
  Narrowing(const Packed& m, const uint8_t* column, ptrdiff_t pitch, ptrdiff_t k0, ptrdiff_t n, uint16_t* to,
            size_t apart)
      : m_(m), pitch_(pitch), w_(column + bytes_before(m, k0)), left_(n), to_(to), apart_(apart) {}

  // Makes the next tile of each column, zeros behind the last input; none if none is left.
  inline __attribute__((always_inline)) void operator()() {
    if (left_ == 0) return;
    if (in_block_ == 0) {
      in_block_ = imin(m_.block, left_);
      group_ = in_group_ = ByRow ? in_block_ : m_.group;
      scales_ = w_;
      minima_ = w_ + div_up(in_block_, group_) * 32;
      w_ += header_bytes(m_, in_block_);
    }
    constexpr int kLine = 32 / Bits;
    const ptrdiff_t n = imin(kTileInputs, in_block_), lines = div_up(n, kLine);
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
      const ptrdiff_t pitch = r * pitch_;
      const vf scale = ByRow ? vf{} : usual_nan(load_half(scales_ + pitch));
      // the offset is a power of two: its product with the scale is exact
      const vf least = ByRow        ? splat((float)-m_.offset)
                       : m_.minimum ? usual_nan(load_half(minima_ + pitch))
                                    : scale * (float)-m_.offset;
      const Lift l = lift<Bits, ByRow>(scale, least);
      uint16_t* const to = to_ + (size_t)r * apart_;
      if (n == kTileInputs) {
#pragma GCC unroll 8
        for (int i = 0; i < kTileInputs / kLine; ++i) {
          narrow_line<Bits, ByRow>(w_ + pitch + i * 64, to + i * kLine * kLanes, l);
        }
      } else {
        __builtin_memset(to, 0, kTileInputs * kLanes * sizeof(uint16_t));
        for (ptrdiff_t i = 0; i < lines; ++i) {
          narrow_line<Bits, ByRow>(w_ + pitch + i * 64, to + i * kLine * kLanes, l);
        }
      }
    }
    to_ += kTileInputs * kLanes;
    w_ += lines * 64;
    left_ -= n;
    in_block_ -= n;
    in_group_ -= n;
    if (in_group_ <= 0) {
      in_group_ = group_;
      scales_ += 32;
      minima_ += 32;
    }
  }

 private:
  const Packed& m_;
  ptrdiff_t pitch_;
  const uint8_t *w_, *scales_ = nullptr, *minima_ = nullptr;
  ptrdiff_t left_, in_block_ = 0, in_group_ = 0, group_ = 0;
  uint16_t* to_;
  size_t apart_;
};

struct NothingBefore {
  void operator()() const {}
};
#endif
