// Integer dot products of 4 bytes in each 32-bit lane, exact on every instruction set: codes are unsigned bytes,
// activations signed ones. Included by packed_inl.h inside its namespace.

#if defined(FANFOLD_VNNI) && FANFOLD_W == 16
INL vi dot4(vi sum, vi codes, vi x) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x); }
INL vi dot4_small(vi sum, vi codes, vi x) { return dot4(sum, codes, x); }
#elif defined(FANFOLD_VNNI) && FANFOLD_W == 8
INL vi dot4(vi sum, vi codes, vi x) { return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x); }
INL vi dot4_small(vi sum, vi codes, vi x) { return dot4(sum, codes, x); }
#elif FANFOLD_W == 16
// Even and odd bytes as 16-bit numbers: 255 * 127 * 2 would saturate a 16-bit sum, a 32-bit one holds it.
INL vi dot4(vi sum, vi codes, vi x) {
  const __m512i c = (__m512i)codes, v = (__m512i)x;
  const __m512i even =
      _mm512_madd_epi16(_mm512_and_si512(c, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(c, 8), _mm512_srai_epi16(v, 8));
  return sum + ((vi)even + (vi)odd);
}
INL vi dot4_small(vi sum, vi codes, vi x) {  // codes up to 15: 15 * 127 * 2 fits 16 bits
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
  return sum + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#elif FANFOLD_W == 8
INL vi dot4(vi sum, vi codes, vi x) {
  const __m256i c = (__m256i)codes, v = (__m256i)x;
  const __m256i even =
      _mm256_madd_epi16(_mm256_and_si256(c, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(c, 8), _mm256_srai_epi16(v, 8));
  return sum + ((vi)even + (vi)odd);
}
INL vi dot4_small(vi sum, vi codes, vi x) {
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
  return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
INL vi dot4(vi sum, vi codes, vi x) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const vi c = (vi)((vu)codes >> (8 * i)) & 255, v = (vi)((vu)x << (24 - 8 * i)) >> 24;
    sum += c * v;
  }
  return sum;
}
INL vi dot4_small(vi sum, vi codes, vi x) { return dot4(sum, codes, x); }
#endif

INL vi load_i(const uint8_t* p) {
  vi v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
INL vi splat4(const int8_t* p) {  // 4 bytes in every lane
  int32_t v;
  __builtin_memcpy(&v, p, sizeof v);
  return splat_i(v);
}

// W float16 numbers as float32.
#if FANFOLD_W == 16
INL vf load_half(const uint8_t* p) {
  __m256i h;
  __builtin_memcpy(&h, p, sizeof h);
  return (vf)_mm512_cvtph_ps(h);
}
#elif FANFOLD_W == 8
INL vf load_half(const uint8_t* p) {
  __m128i h;
  __builtin_memcpy(&h, p, sizeof h);
  return (vf)_mm256_cvtph_ps(h);
}
#else
INL vf load_half(const uint8_t* p) {
  vh h;
  __builtin_memcpy(&h, p, sizeof h);
  const vu bits = __builtin_convertvector(h, vu), sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
  // Exponent and mantissa moved up and scaled by 2^112 are exact for subnormals too; infinity and NaN are put right.
  const vf scaled = (vf)(rest << 13) * 0x1p112f;
  const vu wide = (vu)scaled, special = (rest << 13) | 0x7f800000u;
  return (vf)((vu)(rest >= 0x7c00 ? (vi)special : (vi)wide) | sign);
}
#endif
