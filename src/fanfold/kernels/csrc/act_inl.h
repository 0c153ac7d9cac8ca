// Activations as float32 vector polynomials. Coefficients: weighted minimax fits made for this file (Lawson's
// iteration in float64), rounded to float32. Largest errors are stated and asserted by tests/test_cpu_kernel.py.
//
// F is one vector, vf, or Two (or two of Two) of them, whose operations take turns. An activation is a chain, each of
// whose operations waits some cycles for the one before; a core looks about two activations ahead, too few to be busy.
//
// Arguments of exp that are products (beta x, x^2 / 2, gelu_tanh's cubic) are formed exactly enough for a float32 pair,
// by fused multiply-adds or in float64: an error of half a unit in t costs t half units in exp(t), 40 of them at t =
// -80.

// Comparisons with NaN are false: written this way round, the clamps keep it, as torch's do.
#if FANFOLD_W == 16  // one instruction, which gives its second operand if one is NaN
INL vf at_least(vf x, float low) { return (vf)_mm512_max_ps((__m512)splat(low), (__m512)x); }
INL vf at_most(vf x, float high) { return (vf)_mm512_min_ps((__m512)splat(high), (__m512)x); }
#else
INL vf at_least(vf x, float low) { return x < low ? splat(low) : x; }
INL vf at_most(vf x, float high) { return x > high ? splat(high) : x; }
#endif
INL vf where_less(vf x, float than, vf yes, vf no) { return x < than ? yes : no; }
INL vf where_greater(vf x, float than, vf yes, vf no) { return x > than ? yes : no; }
INL vf vabs(vf x) { return (vf)((vi)x & 0x7fffffff); }
INL vf minus_abs(vf x) { return (vf)((vi)x | splat_i(INT32_MIN)); }
INL vf times_sign_of(vf sign, vf x) { return (vf)((vi)x ^ ((vi)sign & splat_i(INT32_MIN))); }
INL vi integer(vf n) { return (vi)(n + 0x1.8p23f) - 0x4b400000; }  // of whole n; a NaN gives any number
INL vf power_of_two(vi n) { return (vf)((vu)(n + 127) << 23); }
INL vf power_of_two(vf n) { return power_of_two(integer(n)); }
INL vf times_power_of_two(vf x, vf whole) {
#if FANFOLD_W == 16
  return (vf)_mm512_scalef_ps((__m512)x, (__m512)whole);
#else
  const vi n = integer(whole), half = n >> 1;
  return x * power_of_two(half) * power_of_two(n - half);
#endif
}
// 1 / d for d from 1 to 20, or NaN. A division takes AVX-512 16 cycles, an estimate and Newton's step 4.
INL vf reciprocal(vf d) {
#if FANFOLD_W == 16
  const vf r = (vf)_mm512_rcp14_ps((__m512)d);
  return r + r * (1.0f - d * r);
#else
  return 1.0f / d;
#endif
}
#if FANFOLD_W >= 8
INL vf product_error(vf a, vf b, vf product) {
#if FANFOLD_W == 16
  return (vf)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)product);
#else
  return (vf)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)product);
#endif
}
// A product rounded once and for all: the compiler may not fuse it into one sum and leave it rounded in another. Nor
// choose which of two products it fuses into their sum: a channel's bits may not depend on whether it comes in a vf.
INL vf rounded(vf product) {
  asm("" : "+" HELD(product));
  return product;
}
#endif

template <class H>
struct Two {
  H first, second;
};
#define FANFOLD_OF_TWO(op)                             \
  template <class H>                                   \
  INL Two<H> operator op(Two<H> a, Two<H> b) {         \
    return {a.first op b.first, a.second op b.second}; \
  }                                                    \
  template <class H>                                   \
  INL Two<H> operator op(Two<H> a, float b) {          \
    return {a.first op b, a.second op b};              \
  }                                                    \
  template <class H>                                   \
  INL Two<H> operator op(float a, Two<H> b) {          \
    return {a op b.first, a op b.second};              \
  }
FANFOLD_OF_TWO(+)
FANFOLD_OF_TWO(-)
FANFOLD_OF_TWO(*)
FANFOLD_OF_TWO(/)
#undef FANFOLD_OF_TWO
template <class H>
INL Two<H> operator-(Two<H> a) {
  return {-a.first, -a.second};
}

template <class F>
struct Lanes {
  static constexpr int count = W;
  static INLINED F of(float s) { return splat(s); }
  static INLINED F at(const float* p) { return load(p); }
};
template <class H>
struct Lanes<Two<H>> {
  static constexpr int count = 2 * Lanes<H>::count;
  static INLINED Two<H> of(float s) { return {Lanes<H>::of(s), Lanes<H>::of(s)}; }
  static INLINED Two<H> at(const float* p) { return {Lanes<H>::at(p), Lanes<H>::at(p + Lanes<H>::count)}; }
};
template <class F>
INL F all(float s) {
  return Lanes<F>::of(s);
}
template <class T, class H>
INL void put(T* p, Two<H> v) {
  put(p, v.first);
  put(p + Lanes<H>::count, v.second);
}

#define FANFOLD_OF_EACH(f)            \
  template <class H>                  \
  INL Two<H> f(Two<H> x) {            \
    return {f(x.first), f(x.second)}; \
  }
FANFOLD_OF_EACH(vabs)
FANFOLD_OF_EACH(minus_abs)
FANFOLD_OF_EACH(power_of_two)
FANFOLD_OF_EACH(reciprocal)
#if FANFOLD_W >= 8
FANFOLD_OF_EACH(rounded)
#endif
#undef FANFOLD_OF_EACH
template <class H>
INL Two<H> at_least(Two<H> x, float low) {
  return {at_least(x.first, low), at_least(x.second, low)};
}
template <class H>
INL Two<H> at_most(Two<H> x, float high) {
  return {at_most(x.first, high), at_most(x.second, high)};
}
template <class H>
INL Two<H> times_sign_of(Two<H> sign, Two<H> x) {
  return {times_sign_of(sign.first, x.first), times_sign_of(sign.second, x.second)};
}
template <class H>
INL Two<H> times_power_of_two(Two<H> x, Two<H> n) {
  return {times_power_of_two(x.first, n.first), times_power_of_two(x.second, n.second)};
}
template <class H>
INL Two<H> where_less(Two<H> x, float than, Two<H> yes, Two<H> no) {
  return {where_less(x.first, than, yes.first, no.first), where_less(x.second, than, yes.second, no.second)};
}
template <class H>
INL Two<H> where_greater(Two<H> x, float than, Two<H> yes, Two<H> no) {
  return {where_greater(x.first, than, yes.first, no.first), where_greater(x.second, than, yes.second, no.second)};
}
#if FANFOLD_W >= 8
template <class H>
INL Two<H> product_error(Two<H> a, Two<H> b, Two<H> product) {
  return {product_error(a.first, b.first, product.first), product_error(a.second, b.second, product.second)};
}
#endif

// As many side by side as the registers are good for.
using Some = std::conditional_t<W == 16, Two<Two<vf>>, std::conditional_t<W == 8, Two<vf>, vf>>;

template <class F>
struct Reduced {
  F n, r;  // x = n ln 2 + r, |r| <= ln 2 / 2
  F q;     // exp(r) = 1 + r + r^2 q
};
template <class F>
INL Reduced<F> reduce(F x) {
  const float magic = 0x1.8p23f;  // adding it rounds to an integer, which then sits in the low bits
  const F shifted = x * 0x1.715476p0f + magic;
  const F n = shifted - magic;
  const F r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  F q = all<F>(0.00019913854f);
  q = q * r + 0.001394122f;
  q = q * r + 0.008333273f;
  q = q * r + 0.04166635f;
  q = q * r + 0.16666667f;
  q = q * r + 0.5f;
  return {n, r, q};
}

template <class F>
INL F exp_near(F x) {  // -106 <= x <= 0, gradual underflow included
  const Reduced<F> d = reduce(x);
  return times_power_of_two((d.q * d.r + 1.0f) * d.r + 1.0f, d.n);
}
template <class F>
INL F exp_neg(F x) {  // x <= 0
  return exp_near(at_least(x, -105.0f));
}

template <class F>
INL F expm1_neg(F x) {  // x <= 0
  const Reduced<F> d = reduce(at_least(x, -40.0f));
  const F scale = power_of_two(d.n), e = d.r + d.r * d.r * d.q;
  return scale * e + (scale - 1.0f);
}

// high + low, |low| at most half a unit of high. low is not a number where high is infinite.
template <class F>
struct Exact {
  F high, low;
};
#if FANFOLD_W >= 8
template <class F>
INL Exact<F> scaled(F x, double beta) {
  const float first = (float)beta;
  const F high = rounded(x * first);
  return {high, product_error(x, all<F>(first), high) + x * (float)(beta - (double)first)};
}
template <class F>
INL Exact<F> half_square(F a) {
  const F half = 0.5f * a, high = rounded(a * half);
  return {high, product_error(a, half, high)};
}
template <class F>
INL Exact<F> gelu_tanh_argument(F x) {  // x (c1 + c2 x^2)
  const float c1 = (float)1.5957691216057308, c2 = (float)0.07135481627260025;
  const float rest1 = (float)(1.5957691216057308 - (double)c1), rest2 = (float)(0.07135481627260025 - (double)c2);
  const F s = rounded(x * x), s_rest = product_error(x, x, s);
  const F p = rounded(c2 * s), p_rest = product_error(all<F>(c2), s, p) + (c2 * s_rest + rounded(rest2 * s));
  const F v = c1 + p, of_p = v - c1;
  const F v_rest = (c1 - (v - of_p)) + (p - of_p) + (rest1 + p_rest);
  const F high = rounded(x * v);
  return {high, product_error(x, v, high) + x * v_rest};
}
#else
struct Pair {
  vd low, high;  // the vector's first and second half, in float64
};

template <int... I>
INL vf_half half_low(vf v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, I...);
}
template <int... I>
INL vf_half half_high(vf v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, (I + W / 2)...);
}
template <int... I>
INL vf join(vf_half a, vf_half b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, I...);
}
INL Pair to_double(vf v) {
  constexpr auto half = std::make_integer_sequence<int, W / 2>{};
  return {__builtin_convertvector(half_low(v, half), vd), __builtin_convertvector(half_high(v, half), vd)};
}
INL vf to_float(const Pair& p) {
  return join(__builtin_convertvector(p.low, vf_half), __builtin_convertvector(p.high, vf_half),
              std::make_integer_sequence<int, W>{});
}

INL Exact<vf> exact(const Pair& p) {
  const vf high = to_float(p);
  const Pair h = to_double(high);
  return {high, to_float({p.low - h.low, p.high - h.high})};
}
INL Exact<vf> scaled(vf x, double beta) {
  const Pair p = to_double(x);
  return exact({p.low * beta, p.high * beta});
}
INL Exact<vf> half_square(vf a) {
  const Pair p = to_double(a);
  return exact({0.5 * p.low * p.low, 0.5 * p.high * p.high});
}
INL vd gelu_tanh_half(vd x) { return x * (1.5957691216057308 + 0.07135481627260025 * (x * x)); }
INL Exact<vf> gelu_tanh_argument(vf x) {
  const Pair p = to_double(x);
  return exact({gelu_tanh_half(p.low), gelu_tanh_half(p.high)});
}
#endif

template <class F>
INL F sigmoid_of(F e, F x) {  // e = exp(-|x|): the form for x < 0 does not cancel
  const F r = reciprocal(1.0f + e);
  return where_less(x, 0.0f, e * r, r);
}
template <class F>
INL F exp_minus_abs(F x) {
  return exp_neg(minus_abs(x));
}
template <class F>
INL F exp_minus_abs(Exact<F> t) {
  const F high = minus_abs(t.high), low = where_greater(high, -150.0f, times_sign_of(t.high, t.low), F{});
  const F e = exp_neg(high);
  return e - e * low;
}
template <class F>
INL F sigmoid(F x) {
  return sigmoid_of(exp_minus_abs(x), x);
}
template <class F>
INL F sigmoid(Exact<F> t) {
  return sigmoid_of(exp_minus_abs(t), t.high);
}

template <class F>
INL F gelu_tanh(F x) {  // (1 + tanh u) / 2 = sigmoid(2 u)
  return x * sigmoid(gelu_tanh_argument(x));
}

template <class F>
struct Normal {
  F below;    // Phi(x)
  F density;  // times sqrt(2 pi)
};
template <class F>
INL Normal<F> normal(F x) {
  // Phi(-a) = exp(-a^2 / 2) P(a), P(a) = erfcx(a / sqrt 2) / 2 = p(t) / (a + 3), t = (a - 3) / (a + 3):
  // the quotient takes P's decay, so that the polynomial's terms do not cancel.
  const F a = at_most(vabs(x), 14.5f);  // where the density is 0 in float32
  const F inverse = reciprocal(a + 3.0f);
  const F t = (a - 3.0f) * inverse;
  F p = all<F>(5.451319157e-05f);
  p = p * t + 1.313839457e-04f;
  p = p * t + -2.447135921e-04f;
  p = p * t + -1.032609143e-03f;
  p = p * t + 1.024733065e-03f;
  p = p * t + 6.969317794e-03f;
  p = p * t + -1.046250761e-02f;
  p = p * t + -4.726268724e-02f;
  p = p * t + 2.300176919e-01f;
  p = p * t + -5.093320012e-01f;
  p = p * t + 7.290837169e-01f;
  const Exact<F> half = half_square(a);
  const F e = exp_near(-half.high), density = e - e * half.low;
  const F tail = p * inverse * density;
  return {where_less(x, 0.0f, tail, 1.0f - tail), density};
}
template <class F>
INL F gelu_erf(F x) {
  return x * normal(x).below;
}

template <class F>
INL F log1p_unit(F e) {  // 0 <= e <= 1: 2 atanh(e / (2 + e))
  const F s = e / (2.0f + e), z = s * s;
  F p = all<F>(2.430093735e-01f);
  p = p * z + 2.142765671e-01f;
  p = p * z + 2.861688435e-01f;
  p = p * z + 3.999887705e-01f;
  p = p * z + 6.666667461e-01f;
  return (s + s) + s * z * p;
}

template <class F>
INL F tanh_(F x) {
  const F e = expm1_neg(-2.0f * vabs(x));
  return times_sign_of(x, vabs(e) / (2.0f + e));
}

template <class F>
INL F mish(F x) {  // tanh(log(1 + n)) = n (n + 2) / (n (n + 2) + 2), n = exp(x), divided by n^2 for x > 0
  const F e = exp_neg(minus_abs(x));
  const F small = e * (e + 2.0f), large = 1.0f + 2.0f * e;
  const F top = where_less(x, 0.0f, small, large);
  return x * (top / (top + where_less(x, 0.0f, all<F>(2.0f), 2.0f * e * e)));
}

template <class F>
INL F softplus(F x) {
  return at_least(x, 0.0f) + log1p_unit(exp_neg(minus_abs(x)));
}

template <class F>
INL F elu(F x, float alpha) {
  return where_greater(x, 0.0f, x, alpha * expm1_neg(at_most(x, 0.0f)));
}

template <class F>
INL F xielu(F x, float alpha_p, float alpha_n, float beta, float eps) {
  const F neg = (expm1_neg(at_most(x, eps)) - x) * alpha_n;
  return where_greater(x, 0.0f, alpha_p * x * x, neg) + beta * x;
}

// use(activation), which is called once: its vectors, however many, share the constants in registers.
template <class Use>
INL void with_activation(int act, const double* params, Use use) {
  const float p0 = (float)params[0], p1 = (float)params[1], p2 = (float)params[2], p3 = (float)params[3];
  const double beta = params[0];
  switch (act) {
    case kRelu:
      return use([](auto x) INLINED { return at_least(x, 0.0f); });
    case kRelu2:
      return use([](auto x) INLINED { return at_least(x, 0.0f) * at_least(x, 0.0f); });
    case kGeluErf:
      return use([](auto x) INLINED { return gelu_erf(x); });
    case kGeluTanh:
      return use([](auto x) INLINED { return gelu_tanh(x); });
    case kGeluSigmoid:
      return use([](auto x) INLINED { return x * sigmoid(scaled(x, 1.702)); });
    case kSilu:
      if (beta == 1.0) return use([](auto x) INLINED { return x * sigmoid(x); });
      return use([=](auto x) INLINED { return x * sigmoid(scaled(x, beta)); });
    case kSigmoid:
      return use([](auto x) INLINED { return sigmoid(x); });
    case kTanh:
      return use([](auto x) INLINED { return tanh_(x); });
    case kSoftplus:
      return use([](auto x) INLINED { return softplus(x); });
    case kElu:
      return use([=](auto x) INLINED { return elu(x, p0); });
    case kMish:
      return use([](auto x) INLINED { return mish(x); });
    case kLeakyRelu:
      return use([=](auto x) INLINED { return where_greater(x, 0.0f, x, p0 * x); });
    case kXielu:
      return use([=](auto x) INLINED { return xielu(x, p0, p1, p2, p3); });
    default:  // identity
      return use([](auto x) INLINED { return x; });
  }
}
