// The middle of an FFN. Included after act_inl.h by ffn_inl.h and packed_isa.h, inside their namespaces.

// Clamps, activation and gate * up, in float32: n coefficients, a multiple of W, of each of T rows of gate and up,
// which are `pitch` apart, to rows `to_pitch` apart. They may take the place of what they are made of.
template <class AnyCall, class To>
void coefficients(const AnyCall& c, bool gated, const float* gate, const float* up, ptrdiff_t pitch, ptrdiff_t T,
                  ptrdiff_t n, To* to, ptrdiff_t to_pitch) {
  const float gate_limit = c.gate_limit, up_limit = c.up_limit, offset = c.up_offset;
  with_activation(c.act, c.params, [=](auto act) {
    for (ptrdiff_t t = 0; t < T; ++t) {
      const float *const g = gate + t * pitch, *const u = up + t * pitch;
      To* const row = to + t * to_pitch;
      ptrdiff_t i = 0;
      const auto some = [&](auto value, auto pre) __attribute__((always_inline)) {
        value = at_least(at_most(value, up_limit), -up_limit) + offset;
        return act(at_most(pre, gate_limit)) * value;
      };
      constexpr ptrdiff_t kSome = Lanes<Some>::count;
      for (; i + kSome <= n && !gated; i += kSome) put(row + i, act(Lanes<Some>::at(u + i)));
      for (; i + kSome <= n && gated; i += kSome) put(row + i, some(Lanes<Some>::at(u + i), Lanes<Some>::at(g + i)));
      for (; i < n && !gated; i += W) put(row + i, act(load(u + i)));
      for (; i < n && gated; i += W) put(row + i, some(load(u + i), load(g + i)));
    }
  });
}

// The same of one row, in place. Returns where they are.
template <class AnyCall>
float* combine(const AnyCall& c, bool gated, float* gate, float* up, ptrdiff_t n) {
  float* const row = gated ? gate : up;
  coefficients(c, gated, gate, up, 0, 1, n, row, 0);
  return row;
}

// Tasks are handed out one by one, so that a thread on a busy core takes fewer.
INL ptrdiff_t take(ptrdiff_t& next) { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); }

// Everyone has finished stage `s`, and nobody touches its counter again before the next barrier.
template <class AnyJob>
INL void finish(AnyJob& job, int s, int thread, int threads) {
  if (threads > 1) team_barrier();
  if (thread == 0) __atomic_store_n(&job.next[s], 0, __ATOMIC_RELAXED);
}
