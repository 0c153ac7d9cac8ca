// The middle of an FFN. Included after act_inl.h by ffn_inl.h and packed_isa.h, inside their namespaces.

// Clamps, activation and gate * up in place, in float32; n is a multiple of W. Returns where the coefficients are.
template <class AnyCall>
float* combine(const AnyCall& c, bool gated, float* gate, float* up, ptrdiff_t n) {
  if (!gated) {
    activate(c.act, c.params, up, n);
    return up;
  }
  const float gate_limit = c.gate_limit, up_limit = c.up_limit, offset = c.up_offset;
  if (gate_limit < __builtin_inff()) each(gate, n, [=](vf v) { return at_most(v, gate_limit); });
  activate(c.act, c.params, gate, n);
  for (ptrdiff_t i = 0; i < n; i += W) {
    store(gate + i, load(gate + i) * (at_least(at_most(load(up + i), up_limit), -up_limit) + offset));
  }
  return gate;
}

// Tasks are handed out one by one, so that a thread on a busy core takes fewer.
INL ptrdiff_t take(ptrdiff_t& next) { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); }

// Everyone has finished stage `s`, and nobody touches its counter again before the next barrier.
template <class AnyJob>
INL void finish(AnyJob& job, int s, int thread, int threads) {
  if (threads > 1) team_barrier();
  if (thread == 0) __atomic_store_n(&job.next[s], 0, __ATOMIC_RELAXED);
}
