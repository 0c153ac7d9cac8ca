// The instructions of AVX-512 that the kernels name, made of AVX2's: the build of .ci/emulate finds this file before
// the compiler's own. What the kernels write as vectors of 16 floats the compiler itself cuts in two. Results are those
// of Intel's manual (volume 2; VDPBF16PS and VCVTNEPS2BF16 take subnormal numbers for zeros), but for the reciprocal,
// which is as good as VRCP14PS promises and no better.
#pragma once

#include_next <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

typedef int16_t Shorts __attribute__((vector_size(64)));
struct Floats {
  __m256 low, high;
};
struct Integers {
  __m256i low, high;
};

template <class To, class From>
static inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bytes");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// f of the halves of two vectors.
template <class Half, class V, class F>
static inline V halves(V a, V b, F f) {
  const Half x = as<Half>(a), y = as<Half>(b);
  return as<V>(Half{f(x.low, y.low), f(x.high, y.high)});
}
template <class V>
static inline V min_ps(V a, V b) {
  return halves<Floats>(a, b, [](__m256 x, __m256 y) { return _mm256_min_ps(x, y); });
}
template <class V>
static inline V max_ps(V a, V b) {
  return halves<Floats>(a, b, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); });
}
template <class V>
static inline V madd_epi16(V a, V b) {
  return halves<Integers>(a, b, [](__m256i x, __m256i y) { return _mm256_madd_epi16(x, y); });
}
template <class V>
static inline V maddubs_epi16(V a, V b) {
  return halves<Integers>(a, b, [](__m256i x, __m256i y) { return _mm256_maddubs_epi16(x, y); });
}

template <class V>
static inline V fmadd_ps(V a, V b, V c) {
  const Floats x = as<Floats>(a), y = as<Floats>(b), z = as<Floats>(c);
  return as<V>(Floats{_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)});
}
template <class V>
static inline V fmsub_ps(V a, V b, V c) {
  const Floats x = as<Floats>(a), y = as<Floats>(b), z = as<Floats>(c);
  return as<V>(Floats{_mm256_fmsub_ps(x.low, y.low, z.low), _mm256_fmsub_ps(x.high, y.high, z.high)});
}

static inline __m512 cvtph_ps(__m256i h) {
  const __m128i low = _mm256_castsi256_si128(h), high = _mm256_extracti128_si256(h, 1);
  return as<__m512>(Floats{_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)});
}

static inline __m512i set1_epi16(int n) { return as<__m512i>(Shorts{} + (int16_t)n); }

// Out of line from here on: inlined they take eight minutes to compile.

// sum + four products of unsigned and signed bytes
template <class V>
__attribute__((noinline)) static V dpbusd_epi32(V sum, V codes, V x) {
  uint32_t s[16];
  uint8_t u[64];
  int8_t v[64];
  memcpy(s, &sum, sizeof s);
  memcpy(u, &codes, sizeof u);
  memcpy(v, &x, sizeof v);
  for (int i = 0; i < 64; ++i) s[i / 4] += (uint32_t)((int)u[i] * v[i]);
  memcpy(&sum, s, sizeof s);
  return sum;
}

// 1 / a, rounded to 14 bits
template <class V>
__attribute__((noinline)) static V rcp14_ps(V a) {
  float f[16];
  memcpy(f, &a, sizeof f);
  for (float& e : f) {
    const float r = 1.0f / e;
    uint32_t bits = as<uint32_t>(r);
    if (std::isfinite(r)) bits = (bits + 0x200) & ~0x3ffu;
    e = as<float>(bits);
  }
  memcpy(&a, f, sizeof f);
  return a;
}

// a * 2^floor(n)
template <class V>
__attribute__((noinline)) static V scalef_ps(V a, V n) {
  float f[16], g[16];
  memcpy(f, &a, sizeof f);
  memcpy(g, &n, sizeof g);
  for (int i = 0; i < 16; ++i) {
    const double whole = std::floor((double)g[i]);  // of an infinite one the power is infinite or 0
    const double power = std::isinf(whole) ? whole : std::fmin(std::fmax(whole, -1000.0), 1000.0);
    f[i] = (float)(f[i] * std::exp2(std::isnan(whole) ? whole : power));
  }
  memcpy(&a, f, sizeof f);
  return a;
}

static inline float without_subnormals(float f) { return std::fabs(f) < 0x1p-126f ? std::copysign(0.0f, f) : f; }

static inline float widened(uint16_t bfloat16) { return without_subnormals(as<float>((uint32_t)bfloat16 << 16)); }

static inline uint16_t rounded_to_bfloat16(float f) {  // to nearest, ties to even
  const uint32_t bits = as<uint32_t>(without_subnormals(f));
  if (std::isnan(f)) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

__attribute__((noinline, unused)) static __m256bh cvtneps_pbh(__m512 v) {
  float f[16];
  uint16_t out[16];
  memcpy(f, &v, sizeof f);
  for (int i = 0; i < 16; ++i) out[i] = rounded_to_bfloat16(f[i]);
  __m256bh made;
  memcpy(&made, out, sizeof out);
  return made;
}

// sum + the products of two pairs, the second of a pair first
template <class V>
__attribute__((noinline)) static V dpbf16_ps(V sum, __m512bh a, __m512bh b) {
  float s[16];
  uint16_t p[32], q[32];
  memcpy(s, &sum, sizeof s);
  memcpy(p, &a, sizeof p);
  memcpy(q, &b, sizeof q);
  for (int i = 0; i < 32; ++i) {
    const int at = i ^ 1;
    float& to = s[i / 2];
    to = without_subnormals(std::fma(widened(p[at]), widened(q[at]), without_subnormals(to)));
  }
  memcpy(&sum, s, sizeof s);
  return sum;
}

}  // namespace emulated

#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_maddubs_epi16 emulated::maddubs_epi16
#define _mm512_min_ps emulated::min_ps
#define _mm512_max_ps emulated::max_ps
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_fmsub_ps emulated::fmsub_ps
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_rcp14_ps emulated::rcp14_ps
#define _mm512_scalef_ps emulated::scalef_ps
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_set1_epi16 emulated::set1_epi16
