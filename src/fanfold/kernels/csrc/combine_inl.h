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
      for (ptrdiff_t i = 0; i < n && !gated; i += W) put(row + i, act(load(u + i)));
      for (ptrdiff_t i = 0; i < n && gated; i += W) {
        const vf value = at_least(at_most(load(u + i), up_limit), -up_limit) + offset;
        put(row + i, act(at_most(load(g + i), gate_limit)) * value);
      }
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
