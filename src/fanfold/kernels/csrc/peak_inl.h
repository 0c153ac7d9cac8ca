// The rates of multiply-adds that an instruction set reaches in registers. Included by packed_isa.h.

// Does `rounds` rounds of independent multiply-adds; returns how many operations that were (an add and a multiply are
// two), 0 where the instruction set has no unit for them.
static double burn(Arithmetic kind, ptrdiff_t rounds) {
  constexpr int kChains = 12;  // more than latency times units
  if (kind == kFloatArithmetic) {
    vf v[kChains];
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) v[i] = splat((float)i);
    for (ptrdiff_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
      for (int i = 0; i < kChains; ++i) {
        v[i] = v[i] * 0.5f + 0.25f;
        asm volatile("" : "+" HELD(v[i]));
      }
    }
    return 2.0 * kChains * W * (double)rounds;
  }
#if defined(FANFOLD_AMX)
  const TileUnit unit(true);
  const bool floats = kind == kBf16Arithmetic;
  for (ptrdiff_t r = 0; r < rounds; ++r) {
    if (floats) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    } else {
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  return 4.0 * 2 * 16 * 16 * (floats ? 32 : 64) * (double)rounds;
#else
#if defined(FANFOLD_BF16)
  if (kind == kBf16Arithmetic) {
    __m512 v[kChains] = {};
    const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (ptrdiff_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
      for (int i = 0; i < kChains; ++i) {
        v[i] = _mm512_dpbf16_ps(v[i], one, one);
        asm volatile("" : "+" HELD(v[i]));
      }
    }
    return 4.0 * kChains * W * (double)rounds;
  }
#endif
#if defined(FANFOLD_VNNI)
  if (kind == kInt8Arithmetic) {
    vi v[kChains] = {};
    const vi one = splat_i(0x01010101);
    for (ptrdiff_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
      for (int i = 0; i < kChains; ++i) {
        v[i] = dot4(v[i], one, one);
        asm volatile("" : "+" HELD(v[i]));
      }
    }
    return 8.0 * kChains * W * (double)rounds;
  }
#elif FANFOLD_W >= 8
  if (kind == kInt8Arithmetic) {  // of codes below 16, in sums of 16 bits: bytes take twice as many instructions
    vi v[kChains] = {};
    vi one = splat_i(0x01010101);
    for (ptrdiff_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
      for (int i = 0; i < kChains; ++i) {
        one = settled(one);  // else a product would be formed once for all
        v[i] = add_small(v[i], one, one);
      }
    }
    for (int i = 0; i < kChains; ++i) asm volatile("" ::HELD(v[i]));
    return 8.0 * kChains * W * (double)rounds;
  }
#endif
  return 0.0;
#endif
}
