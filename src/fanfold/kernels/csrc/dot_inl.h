// Integer dot products of 4 bytes in each 32-bit lane, exact on every instruction set: codes are unsigned bytes,
// activations signed ones. Included by packed_inl.h inside its namespace.

// Without an instruction for it, two ways of pairs of 16-bit numbers: bytes widened to such, or codes below 16, whose
// products with eight quadruples 16 bits hold.
#if FANFOLD_W >= 8 && !defined(FANFOLD_VNNI)
constexpr bool kByPairs = true;
#else
constexpr bool kByPairs = false;
#endif
constexpr int kMostPairs = 8;  // |15 * 127 * 2| * 8 < 2^15

#if defined(FANFOLD_VNNI) && FANFOLD_W == 16
INL vi dot4(vi sum, vi codes, vi x) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x); }
#elif defined(FANFOLD_VNNI) && FANFOLD_W == 8
INL vi dot4(vi sum, vi codes, vi x) { return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x); }
#elif FANFOLD_W == 16
INL vi multiply_pairs(vi a, vi b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
INL vi multiply_small(vi codes, vi x) { return (vi)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x); }
#elif FANFOLD_W == 8
INL vi multiply_pairs(vi a, vi b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
INL vi multiply_small(vi codes, vi x) { return (vi)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x); }
#else
INL vi dot4(vi sum, vi codes, vi x) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const vi c = (vi)((vu)codes >> (8 * i)) & 255, v = (vi)((vu)x << (24 - 8 * i)) >> 24;
    sum += c * v;
  }
  return sum;
}
#endif

#if FANFOLD_W >= 8 && !defined(FANFOLD_VNNI)
typedef int16_t vs __attribute__((vector_size(4 * W)));
// A sum as it is now: GCC would make a tree of a chain of integer additions, and has no registers for its leaves.
INL vi settled(vi sum) {
  asm("" : "+" HELD(sum));
  return sum;
}
INL vi add_pairs(vi sum, vi codes, vi x) { return settled(sum + multiply_pairs(codes, x)); }
// A quadruple's products, as two sums of 16 bits, added to others.
INL vi add_small(vi pairs, vi codes, vi x) { return settled((vi)((vs)pairs + (vs)multiply_small(codes, x))); }
// The sum of both.
INL vi joined(vi pairs) { return multiply_pairs(pairs, (vi)(vs{} + (int16_t)1)); }
// even and odd: bytes 0 and 2, 1 and 3 of a quadruple.
INL vi even_bytes(vi codes) { return codes & 0x00ff00ff; }
INL vi odd_bytes(vi codes) {
  typedef uint16_t vus __attribute__((vector_size(4 * W)));
  return (vi)((vus)codes >> 8);
}
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
