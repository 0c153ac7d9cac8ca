// Activations as float32 vector polynomials. Coefficients: weighted minimax fits made for this file (Lawson's
// iteration in float64), rounded to float32. Largest errors are stated and asserted by tests/test_cpu_kernel.py.
//
// Arguments of exp that are products (beta x, x^2 / 2, gelu_tanh's cubic) are formed exactly enough for a float32 pair,
// by fused multiply-adds or in float64: an error of half a unit in t costs t half units in exp(t), 40 of them at t =
// -80.

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

// Comparisons with NaN are false: written this way round, the clamps keep it, as torch's do.
#if FANFOLD_W == 16  // one instruction, which gives its second operand if one is NaN
INL vf at_least(vf x, float low) { return (vf)_mm512_max_ps((__m512)splat(low), (__m512)x); }
INL vf at_most(vf x, float high) { return (vf)_mm512_min_ps((__m512)splat(high), (__m512)x); }
#else
INL vf at_least(vf x, float low) { return x < low ? splat(low) : x; }
INL vf at_most(vf x, float high) { return x > high ? splat(high) : x; }
#endif
INL vf vabs(vf x) { return (vf)((vi)x & 0x7fffffff); }
INL vf with_sign_of(vf magnitude, vf sign) { return (vf)((vi)magnitude | ((vi)sign & splat_i(INT32_MIN))); }

INL vf power_of_two(vi n) { return (vf)((vu)(n + 127) << 23); }

struct Reduced {
  vf n;  // x = n ln 2 + r
  vf e;  // exp(r) - 1, |r| <= ln 2 / 2
};
INL vi integer(vf n) { return (vi)(n + 0x1.8p23f) - 0x4b400000; }  // of whole n; a NaN gives any number
INL Reduced reduce(vf x) {
  const float magic = 0x1.8p23f;  // adding it rounds to an integer, which then sits in the low bits
  const vf shifted = x * 0x1.715476p0f + magic;
  const vf n = shifted - magic;
  const vf r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  vf q = splat(0.00019913854f);
  q = q * r + 0.001394122f;
  q = q * r + 0.008333273f;
  q = q * r + 0.04166635f;
  q = q * r + 0.16666667f;
  q = q * r + 0.5f;
  return {n, r + r * r * q};
}

INL vf exp_(vf x) {  // the whole range, gradual underflow included
  const Reduced d = reduce(at_most(at_least(x, -105.0f), 89.0f));
#if FANFOLD_W == 16
  return (vf)_mm512_scalef_ps((__m512)(1.0f + d.e), (__m512)d.n);
#else
  const vi n = integer(d.n), first = n >> 1;
  return (1.0f + d.e) * power_of_two(first) * power_of_two(n - first);
#endif
}

INL vf expm1_neg(vf x) {  // x <= 0
  const Reduced d = reduce(at_least(x, -40.0f));
  const vf scale = power_of_two(integer(d.n));
  return scale * d.e + (scale - 1.0f);
}

// high + low, |low| at most half a unit of high. low is not a number where high is infinite.
struct Exact {
  vf high, low;
};
#if FANFOLD_W >= 8
INL vf product_error(vf a, vf b, vf product) {
#if FANFOLD_W == 16
  return (vf)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)product);
#else
  return (vf)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)product);
#endif
}
// A product rounded once and for all: the compiler may not fuse it into one sum and leave it rounded in another.
INL vf rounded(vf product) {
  asm("" : "+v"(product));
  return product;
}
INL Exact scaled(vf x, double beta) {
  const float first = (float)beta;
  const vf high = rounded(x * first);
  return {high, product_error(x, splat(first), high) + x * (float)(beta - (double)first)};
}
INL Exact half_square(vf a) {
  const vf half = 0.5f * a, high = rounded(a * half);
  return {high, product_error(a, half, high)};
}
INL Exact gelu_tanh_argument(vf x) {  // x (c1 + c2 x^2)
  const float c1 = (float)1.5957691216057308, c2 = (float)0.07135481627260025;
  const float rest1 = (float)(1.5957691216057308 - (double)c1), rest2 = (float)(0.07135481627260025 - (double)c2);
  const vf s = rounded(x * x), s_rest = product_error(x, x, s);
  const vf p = rounded(c2 * s), p_rest = product_error(splat(c2), s, p) + (c2 * s_rest + rest2 * s);
  const vf v = c1 + p, of_p = v - c1;
  const vf v_rest = (c1 - (v - of_p)) + (p - of_p) + (rest1 + p_rest);
  const vf high = rounded(x * v);
  return {high, product_error(x, v, high) + x * v_rest};
}
#else
INL Exact exact(const Pair& p) {
  const vf high = to_float(p);
  const Pair h = to_double(high);
  return {high, to_float({p.low - h.low, p.high - h.high})};
}
INL Exact scaled(vf x, double beta) {
  const Pair p = to_double(x);
  return exact({p.low * beta, p.high * beta});
}
INL Exact half_square(vf a) {
  const Pair p = to_double(a);
  return exact({0.5 * p.low * p.low, 0.5 * p.high * p.high});
}
INL vd gelu_tanh_half(vd x) { return x * (1.5957691216057308 + 0.07135481627260025 * (x * x)); }
INL Exact gelu_tanh_argument(vf x) {
  const Pair p = to_double(x);
  return exact({gelu_tanh_half(p.low), gelu_tanh_half(p.high)});
}
#endif

INL vf exp_neg(Exact t) {  // exp(-t), t >= 0
  const vf high = at_most(t.high, 200.0f), low = high < 150.0f ? t.low : vf{};
  const vf e = exp_(-high);
  return e - e * low;
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

INL vf sigmoid_of(vf e, vf x) {  // e = exp(-|x|): the form for x < 0 does not cancel
  const vf r = reciprocal(1.0f + e);
  return x < 0.0f ? e * r : r;
}
INL vf sigmoid(vf x) { return sigmoid_of(exp_(-vabs(x)), x); }
INL vf sigmoid(Exact t) {
  const vi sign = (vi)t.high & splat_i(INT32_MIN);
  return sigmoid_of(exp_neg({vabs(t.high), (vf)((vi)t.low ^ sign)}), t.high);
}

INL vf gelu_tanh(vf x) { return x * sigmoid(gelu_tanh_argument(x)); }  // (1 + tanh u) / 2 = sigmoid(2 u)

struct Normal {
  vf below;    // Phi(x)
  vf density;  // times sqrt(2 pi)
};
INL Normal normal(vf x) {
  // Phi(-a) = exp(-a^2 / 2) P(a), P(a) = erfcx(a / sqrt 2) / 2 = p(t) / (a + 3), t = (a - 3) / (a + 3):
  // the quotient takes P's decay, so that the polynomial's terms do not cancel.
  const vf a = at_most(vabs(x), 16.0f);
  const vf inverse = reciprocal(a + 3.0f);
  const vf t = (a - 3.0f) * inverse;
  vf p = splat(5.451319157e-05f);
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
  const vf density = exp_neg(half_square(a));
  const vf tail = p * inverse * density;
  return {x < 0.0f ? tail : 1.0f - tail, density};
}
INL vf gelu_erf(vf x) { return x * normal(x).below; }

INL vf log1p_unit(vf e) {  // 0 <= e <= 1: 2 atanh(e / (2 + e))
  const vf s = e / (2.0f + e), z = s * s;
  vf p = splat(2.430093735e-01f);
  p = p * z + 2.142765671e-01f;
  p = p * z + 2.861688435e-01f;
  p = p * z + 3.999887705e-01f;
  p = p * z + 6.666667461e-01f;
  return 2.0f * s + s * z * p;
}

INL vf tanh_(vf x) {
  const vf e = expm1_neg(-2.0f * vabs(x));
  return with_sign_of(-e / (2.0f + e), x);
}

INL vf mish(vf x) {  // tanh(log(1 + n)) = n (n + 2) / (n (n + 2) + 2), n = exp(x), divided by n^2 for x > 0
  const vf e = exp_(-vabs(x));
  const vf small = e * (e + 2.0f), large = 1.0f + 2.0f * e;
  const vf top = x < 0.0f ? small : large;
  return x * (top / (top + (x < 0.0f ? splat(2.0f) : 2.0f * e * e)));
}

INL vf softplus(vf x) { return at_least(x, 0.0f) + log1p_unit(exp_(-vabs(x))); }

INL vf xielu(vf x, float alpha_p, float alpha_n, float beta, float eps) {
  const vf neg = (expm1_neg(at_most(x, eps)) - x) * alpha_n;
  return (x > 0.0f ? alpha_p * x * x : neg) + beta * x;
}

// use(activation), which is called once: its vectors, however many, share the constants in registers.
template <class Use>
INL void with_activation(int act, const double* params, Use use) {
  const float p0 = (float)params[0], p1 = (float)params[1], p2 = (float)params[2], p3 = (float)params[3];
  const double beta = params[0];
  switch (act) {
    case kRelu:
      return use([](vf x) { return at_least(x, 0.0f); });
    case kRelu2:
      return use([](vf x) { return at_least(x, 0.0f) * at_least(x, 0.0f); });
    case kGeluErf:
      return use([](vf x) { return gelu_erf(x); });
    case kGeluTanh:
      return use([](vf x) { return gelu_tanh(x); });
    case kGeluSigmoid:
      return use([](vf x) { return x * sigmoid(scaled(x, 1.702)); });
    case kSilu:
      if (beta == 1.0) return use([](vf x) { return x * sigmoid(x); });
      return use([=](vf x) { return x * sigmoid(scaled(x, beta)); });
    case kSigmoid:
      return use([](vf x) { return sigmoid(x); });
    case kTanh:
      return use([](vf x) { return tanh_(x); });
    case kSoftplus:
      return use([](vf x) { return softplus(x); });
    case kElu:
      return use([=](vf x) { return x > 0.0f ? x : p0 * expm1_neg(at_most(x, 0.0f)); });
    case kMish:
      return use([](vf x) { return mish(x); });
    case kLeakyRelu:
      return use([=](vf x) { return x > 0.0f ? x : p0 * x; });
    case kXielu:
      return use([=](vf x) { return xielu(x, p0, p1, p2, p3); });
    default:  // identity
      return use([](vf x) { return x; });
  }
}
