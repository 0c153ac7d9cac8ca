// Activations with their slopes, and the middle of an FFN in training: see Middle. Included by ffn_inl.h after
// act_inl.h.

struct Curve {
  vf value, slope;
};

// x sigmoid(t(x)) and its slope; `inner` is t's.
INL Curve gated_self(vf x, vf s, vf inner) {
  const vf value = x * s;
  return {value, s + value * (1.0f - s) * inner};
}
INL Curve swish_curve(vf x, double beta) {
  if (beta == 1.0) return gated_self(x, sigmoid(x), splat(1.0f));
  const Pair p = to_double(x);
  return gated_self(x, sigmoid(Pair{p.low * beta, p.high * beta}), splat((float)beta));
}
INL Curve gelu_tanh_curve(vf x) {
  const Pair p = to_double(x);
  const vf s = sigmoid(Pair{gelu_tanh_argument(p.low), gelu_tanh_argument(p.high)});
  const vf near = at_most(vabs(x), 32.0f);  // beyond it 1 - s or the value is 0; the square must not overflow
  return gated_self(x, s, 1.5957691216057308f + 3.0f * 0.07135481627260025f * (near * near));
}
INL Curve gelu_erf_curve(vf x) {
  const Normal n = normal(x);
  return {x * n.below, n.below + x * (n.density * 0.3989422804014327f)};
}
INL Curve mish_curve(vf x) {  // x tanh(softplus(x)); softplus' = sigmoid
  const vf e = exp_(-vabs(x));
  const vf top = x < 0.0f ? e * (e + 2.0f) : 1.0f + 2.0f * e, rest = x < 0.0f ? splat(2.0f) : 2.0f * e * e;
  const vf t = top / (top + rest);  // 1 - t = rest / (top + rest) does not cancel
  return {x * t, t + x * (rest / (top + rest)) * (1.0f + t) * sigmoid_of(e, x)};
}
INL Curve tanh_curve(vf x) {  // 1 - tanh^2 = 4 e / (1 + e)^2 with e = exp(-2 |x|)
  const vf e = exp_(-2.0f * vabs(x)), r = 1.0f / (1.0f + e);
  return {tanh_(x), 4.0f * e * r * r};
}
INL Curve sigmoid_curve(vf x) {
  const vf e = exp_(-vabs(x)), r = 1.0f / (1.0f + e);
  return {sigmoid_of(e, x), e * r * r};
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

template <class T>
INL vf read(const Rows& r, ptrdiff_t t, ptrdiff_t i, ptrdiff_t n) {
  const T* const from = (const T*)r.data + t * r.stride + i;
  return n == W ? load(from) : load_part(from, n);
}
template <class T>
INL void write(const Rows& r, ptrdiff_t t, ptrdiff_t i, ptrdiff_t n, vf v) {
  T* const to = (T*)r.data + t * r.stride + i;
  if (n == W) return put(to, v);
  for (ptrdiff_t j = 0; j < n; ++j) put(to + j, v[j]);
}

// The factor that dropout puts on coefficients.
INL vf noise(const Middle& c, ptrdiff_t t, ptrdiff_t i, ptrdiff_t n) {
  typedef uint8_t bytes __attribute__((vector_size(W)));
  bytes kept = {};
  __builtin_memcpy(&kept, c.mask + t * c.mask_stride + i, (size_t)n);
  return __builtin_convertvector(kept, vi) != 0 ? splat(c.kept_scale) : vf{};
}

// Cut: the slope is 0 for x <= 0 whatever it meets, as PyTorch's: infinity times 0 would be NaN.
template <class T, bool Cut, class F>
INL void middle_row(const Middle& c, ptrdiff_t t, F curve) {
  const bool gated = c.gate.data != nullptr, limited = c.gate_limit < __builtin_inff(),
             clipped = c.up_limit < __builtin_inff();
  for (ptrdiff_t i = 0; i < c.d_ff; i += W) {
    const ptrdiff_t n = imin(W, c.d_ff - i);
    const vf up = c.up.data != nullptr ? read<T>(c.up, t, i, n) : vf{};
    const vf pre = gated ? read<T>(c.gate, t, i, n) : up;
    const vf x = gated && limited ? at_most(pre, c.gate_limit) : pre;
    const Curve at = curve(x);
    const vf factor = at_least(at_most(up, c.up_limit), -c.up_limit) + c.up_offset;
    vf m = gated ? at.value * factor : at.value;
    if (c.grad.data != nullptr) {
      vf grad = read<T>(c.grad, t, i, n);
      if (c.mask != nullptr) grad *= noise(c, t, i, n);
      vf inner = (gated ? grad * factor : grad) * at.slope;
      if (Cut) inner = x <= 0.0f ? vf{} : inner;
      if (gated) {
        if (limited) inner = pre <= c.gate_limit ? inner : vf{};
        if (c.to_gate.data != nullptr) write<T>(c.to_gate, t, i, n, inner);
        inner = grad * at.value;
        if (clipped) inner = vabs(up) <= c.up_limit ? inner : vf{};
      }
      if (c.to_up.data != nullptr) write<T>(c.to_up, t, i, n, inner);
    }
    if (c.m.data == nullptr) continue;
    if (c.mask != nullptr) m *= noise(c, t, i, n);
    write<T>(c.m, t, i, n, m);
  }
}

template <class T, bool Cut = false, class F>
INL void middle_rows(MiddlePart& part, F curve) {
  const Middle& c = *part.call;
  for (ptrdiff_t i; (i = take(part.next)) * kMiddleRows < c.tokens;) {
    const ptrdiff_t end = imin((i + 1) * kMiddleRows, c.tokens);
    for (ptrdiff_t t = i * kMiddleRows; t < end; ++t) middle_row<T, Cut>(c, t, curve);
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
        return Curve{x > 0.0f ? x : below, x > 0.0f ? splat(1.0f) : p0 * exp_(at_most(x, 0.0f))};
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
