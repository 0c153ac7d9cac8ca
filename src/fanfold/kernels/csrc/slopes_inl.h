// Activations with their slopes, and the middle of an FFN in training: see Middle. Included by ffn_inl.h after
// act_inl.h.

struct Curve {
  vf value, slope;
};

// sigmoid(t) and 1 - sigmoid(t), neither of them a difference. e = exp(-|t|); x has t's sign.
struct Shares {
  vf value, rest;
};
INL Shares shares(vf e, vf x) {
  const vf large = reciprocal(1.0f + e), small = e * large;
  return {x < 0.0f ? small : large, x < 0.0f ? large : small};
}

// x sigmoid(t(x)) and its slope; `inner` is t's.
INL Curve gated_self(vf x, Shares s, vf inner) {
  const vf value = x * s.value;
  return {value, s.value + value * s.rest * inner};
}
INL Curve swish_curve(vf x, double beta) {
  if (beta == 1.0) return gated_self(x, shares(exp_minus_abs(x), x), splat(1.0f));
  const Exact<vf> t = scaled(x, beta);
  return gated_self(x, shares(exp_minus_abs(t), t.high), splat((float)beta));
}
INL Curve gelu_tanh_curve(vf x) {
  const Exact<vf> t = gelu_tanh_argument(x);
  const vf near = at_most(vabs(x), 32.0f);  // beyond it the rest or the value is 0; the square must not overflow
  return gated_self(x, shares(exp_minus_abs(t), t.high),
                    1.5957691216057308f + 3.0f * 0.07135481627260025f * (near * near));
}
INL Curve gelu_erf_curve(vf x) {
  const Normal<vf> n = normal(x);
  return {x * n.below, n.below + x * (n.density * 0.3989422804014327f)};
}
INL Curve mish_curve(vf x) {  // x tanh(softplus(x)); softplus' = sigmoid
  const vf e = exp_neg(minus_abs(x));
  const vf top = x < 0.0f ? e * (e + 2.0f) : 1.0f + 2.0f * e, rest = x < 0.0f ? splat(2.0f) : 2.0f * e * e;
  const vf t = top / (top + rest);  // 1 - t = rest / (top + rest) does not cancel
  return {x * t, t + x * (rest / (top + rest)) * (1.0f + t) * sigmoid_of(e, x)};
}
// A slope that goes to 0 on both sides, written with e cancels nowhere but has four roundings; written with the value
// it has two where the slope is large: there the value's own error hardly counts.
INL Curve tanh_curve(vf x) {  // 1 - tanh^2 = 4 e / (1 + e)^2 with e = exp(-2 |x|)
  const vf e = exp_neg(-2.0f * vabs(x)), r = reciprocal(1.0f + e), value = tanh_(x), square = value * value;
  return {value, square < 0.5f ? 1.0f - square : 4.0f * e * r * r};
}
INL Curve sigmoid_curve(vf x) {  // r is the larger of the value and 1 - value
  const vf e = exp_neg(minus_abs(x)), r = reciprocal(1.0f + e);
  return {sigmoid_of(e, x), r < 0.75f ? r * (1.0f - r) : e * r * r};
}
INL Curve xielu_curve(vf x, float alpha_p, float alpha_n, float beta, float eps) {
  const vf grown = expm1_neg(at_most(x, eps));
  const vf slope = x > 0.0f ? 2.0f * alpha_p * x : (x <= eps ? grown : splat(-1.0f)) * alpha_n;
  return {xielu(x, alpha_p, alpha_n, beta, eps), slope + beta};
}

struct MiddlePart {
  const Middle* call;
  ptrdiff_t next;
};
constexpr ptrdiff_t kMiddleRows = 4;  // of a task

// 2 W elements in the order in which they are cheapest to widen (load_first, load_second), and back.
INL void put_two(float* p, Two<vf> v) {
  store(p, v.first);
  store(p + W, v.second);
}
INL vu high_half(vf v) {  // rounded as to_bf16 does it
  const vu bits = (vu)v, rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return (vu)(v != v ? (vi)(bits | 0x400000) : (vi)rounded);
}
INL void put_two(uint16_t* p, Two<vf> v) {
  const vu both = (high_half(v.first) >> 16) | (high_half(v.second) & 0xffff0000u);
  __builtin_memcpy(p, &both, sizeof both);
}

template <class T>
INL Two<vf> read(const Rows& r, ptrdiff_t t, ptrdiff_t i, ptrdiff_t n) {
  const T* from = (const T*)r.data + t * r.stride + i;
  T part[2 * W] = {};
  if (n < 2 * W) {
    for (ptrdiff_t j = 0; j < n; ++j) part[j] = from[j];
    from = part;
  }
  return {load_first(from), load_second(from)};
}
template <class T>
INL void write(const Rows& r, ptrdiff_t t, ptrdiff_t i, ptrdiff_t n, Two<vf> v) {
  T* const to = (T*)r.data + t * r.stride + i;
  if (n == 2 * W) return put_two(to, v);
  T part[2 * W];
  put_two(part, v);
  for (ptrdiff_t j = 0; j < n; ++j) to[j] = part[j];
}

// The factors that dropout puts on coefficients, as `read` orders them.
template <class T>
INL Two<vf> noise(const Middle& c, ptrdiff_t t, ptrdiff_t i, ptrdiff_t n) {
  typedef uint8_t bytes __attribute__((vector_size(W)));
  uint8_t kept[2 * W] = {};
  __builtin_memcpy(kept, c.mask + t * c.mask_stride + i, (size_t)n);
  bytes half[2];
  for (int j = 0; j < W; ++j) {
    half[0][j] = kept[sizeof(T) == 2 ? 2 * j : j];
    half[1][j] = kept[sizeof(T) == 2 ? 2 * j + 1 : W + j];
  }
  const auto factor = [&](bytes b) { return __builtin_convertvector(b, vi) != 0 ? splat(c.kept_scale) : vf{}; };
  return {factor(half[0]), factor(half[1])};
}

// What is the same for every element of a call.
struct Limits {
  bool gated, limited, clipped;
  float gate, up, offset;
};

struct Slopes {
  vf to_gate, to_up, m;
};

// Cut: the slope is 0 for x <= 0 whatever it meets, as PyTorch's: infinity times 0 would be NaN.
template <bool Cut, class F>
INL Slopes slopes_of(const Limits& l, vf gate, vf up, vf grad, F curve) {
  const vf pre = l.gated ? gate : up, x = l.limited ? at_most(pre, l.gate) : pre;
  const Curve at = curve(x);
  const vf factor = (l.clipped ? at_least(at_most(up, l.up), -l.up) : up) + l.offset;
  vf inner = (l.gated ? grad * factor : grad) * at.slope;
  if (Cut) inner = x <= 0.0f ? vf{} : inner;
  if (!l.gated) return {vf{}, inner, at.value};
  if (l.limited) inner = pre <= l.gate ? inner : vf{};
  vf outer = grad * at.value;
  if (l.clipped) outer = vabs(up) <= l.up ? outer : vf{};
  return {inner, outer, at.value * factor};
}

template <class T, bool Cut, class F>
INL void middle_row(const Middle& c, const Limits& l, ptrdiff_t t, F curve) {
  for (ptrdiff_t i = 0; i < c.d_ff; i += 2 * W) {
    const ptrdiff_t n = imin(2 * W, c.d_ff - i);
    const Two<vf> up = c.up.data != nullptr ? read<T>(c.up, t, i, n) : Two<vf>{};
    const Two<vf> gate = l.gated ? read<T>(c.gate, t, i, n) : Two<vf>{};
    Two<vf> grad = c.grad.data != nullptr ? read<T>(c.grad, t, i, n) : Two<vf>{};
    const Two<vf> kept = c.mask != nullptr ? noise<T>(c, t, i, n) : Two<vf>{splat(1.0f), splat(1.0f)};
    grad = {grad.first * kept.first, grad.second * kept.second};
    const Slopes one = slopes_of<Cut>(l, gate.first, up.first, grad.first, curve);
    const Slopes two = slopes_of<Cut>(l, gate.second, up.second, grad.second, curve);
    if (c.to_gate.data != nullptr) write<T>(c.to_gate, t, i, n, {one.to_gate, two.to_gate});
    if (c.to_up.data != nullptr) write<T>(c.to_up, t, i, n, {one.to_up, two.to_up});
    if (c.m.data != nullptr) write<T>(c.m, t, i, n, {one.m * kept.first, two.m * kept.second});
  }
}

template <class T, bool Cut = false, class F>
INL void middle_rows(MiddlePart& part, F curve) {
  const Middle& c = *part.call;
  const bool gated = c.gate.data != nullptr;
  const Limits limits = {
      gated,      gated && c.gate_limit < __builtin_inff(), c.up_limit < __builtin_inff(), c.gate_limit, c.up_limit,
      c.up_offset};
  for (ptrdiff_t i; (i = take(part.next)) * kMiddleRows < c.tokens;) {
    const ptrdiff_t end = imin((i + 1) * kMiddleRows, c.tokens);
    for (ptrdiff_t t = i * kMiddleRows; t < end; ++t) middle_row<T, Cut>(c, limits, t, curve);
  }
}

template <class T>
void middle_body(int, int, void* arg) {
  MiddlePart& part = *(MiddlePart*)arg;
  const double* const params = part.call->params;
  const float p0 = (float)params[0], p1 = (float)params[1], p2 = (float)params[2], p3 = (float)params[3];
  const double beta = params[0];
  switch (part.call->act) {
    case kRelu:
      return middle_rows<T, true>(part, [](vf x) { return Curve{at_least(x, 0.0f), splat(1.0f)}; });
    case kRelu2:
      return middle_rows<T, true>(part, [](vf x) {
        const vf above = at_least(x, 0.0f);
        return Curve{above * above, 2.0f * above};
      });
    case kGeluErf:
      return middle_rows<T>(part, [](vf x) { return gelu_erf_curve(x); });
    case kGeluTanh:
      return middle_rows<T>(part, [](vf x) { return gelu_tanh_curve(x); });
    case kGeluSigmoid:
      return middle_rows<T>(part, [](vf x) { return swish_curve(x, 1.702); });
    case kSilu:
      return middle_rows<T>(part, [=](vf x) { return swish_curve(x, beta); });
    case kSigmoid:
      return middle_rows<T>(part, [](vf x) { return sigmoid_curve(x); });
    case kTanh:
      return middle_rows<T>(part, [](vf x) { return tanh_curve(x); });
    case kSoftplus:
      return middle_rows<T>(part, [](vf x) { return Curve{softplus(x), sigmoid(x)}; });
    case kElu:
      return middle_rows<T>(part, [=](vf x) {
        const vf below = p0 * expm1_neg(at_most(x, 0.0f));
        return Curve{x > 0.0f ? x : below, x > 0.0f ? splat(1.0f) : p0 * exp_neg(at_most(x, 0.0f))};
      });
    case kMish:
      return middle_rows<T>(part, [](vf x) { return mish_curve(x); });
    case kLeakyRelu:
      return middle_rows<T>(part,
                            [=](vf x) { return Curve{x > 0.0f ? x : p0 * x, x > 0.0f ? splat(1.0f) : splat(p0)}; });
    case kXielu:
      return middle_rows<T>(part, [=](vf x) { return xielu_curve(x, p0, p1, p2, p3); });
    default:  // identity
      return middle_rows<T>(part, [](vf x) { return Curve{x, splat(1.0f)}; });
  }
}

void middle(const Middle& c) {
  MiddlePart part = {&c, 0};
  parallel(c.threads, c.dtype == kFloat32 ? middle_body<float> : middle_body<uint16_t>, &part);
}
