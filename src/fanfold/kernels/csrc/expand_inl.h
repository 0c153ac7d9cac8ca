// Columns with their codes unpacked, where that pays because many tokens follow. Included by packed_inl.h.

// Of whole blocks; where there are none, of whole lines.
INL ptrdiff_t bytes_before(const Packed& m, ptrdiff_t inputs) {
  return m.group == 0 ? inputs * kLanes * m.bits / 8 : inputs / m.block * m.block_bytes;
}

// Inputs [k0, k0 + n) of a column as float32 lines: what "float" activations are multiplied with. The scale of a row,
// where there is one, comes at the end.
static void expand(const Packed& m, const uint8_t* column, ptrdiff_t k0, ptrdiff_t n, float* to) {
  const uint8_t* w = column + bytes_before(m, k0);
  if (m.format == kBf16) {
    for (ptrdiff_t k = 0; k < n; k += 2, w += 64) {
      for (int v = 0; v < V; ++v) {
        store(to + k * kLanes + v * W, load_first((const uint16_t*)w + v * W * 2));
        if (k + 1 < n) store(to + (k + 1) * kLanes + v * W, load_second((const uint16_t*)w + v * W * 2));
      }
    }
    return;
  }
  if (m.format == kFp16) {
    for (ptrdiff_t k = 0; k < n; ++k, w += 32) {
      for (int v = 0; v < V; ++v) store(to + k * kLanes + v * W, load_half(w + v * W * 2));
    }
    return;
  }
  const int per_line = m.bits == 4 ? 8 : 4;
  for (ptrdiff_t b = 0; b < n; b += m.block) {
    const ptrdiff_t inputs = imin(m.block, n - b), groups = m.group != 0 ? div_up(inputs, m.group) : 1;
    const uint8_t* const scales = w;
    w += header_bytes(m, inputs);
    for (ptrdiff_t k = 0; k < inputs; k += per_line, w += 64) {
      const ptrdiff_t g = m.group != 0 ? k / m.group : 0;
      for (int v = 0; v < V; ++v) {
        const vf scale = m.group != 0 ? load_half(scales + g * 32 + v * W * 2) : splat(1.0f);
        const vf least = m.minimum ? load_half(scales + (groups + g) * 32 + v * W * 2) : vf{};
        const vu codes = (vu)load_i(w + v * W * 4);
        for (int i = 0; i < per_line && k + i < inputs; ++i) {
          const vu code = m.bits == 8 ? (codes >> (8 * i)) & 255 : (codes >> (8 * (i % 4) + 4 * (i / 4))) & 15;
          const vf value = __builtin_convertvector((vi)code - m.offset, vf) * scale + least;
          store(to + (b + k + i) * kLanes + v * W, value);
        }
      }
    }
  }
}

// Lines of codes of 4 bits with every code in a byte of its own: twice as many lines.
INL void unpack_lines(const uint8_t* w, ptrdiff_t lines, uint8_t* to) {
  for (ptrdiff_t i = 0; i < lines; ++i, w += 64, to += 128) {
    for (int v = 0; v < V; ++v) {
      const vi codes = load_i(w + v * W * 4);
      const vi low = codes & 0x0f0f0f0f, high = (vi)((vu)codes >> 4) & 0x0f0f0f0f;
      __builtin_memcpy(to + v * W * 4, &low, sizeof low);
      __builtin_memcpy(to + 64 + v * W * 4, &high, sizeof high);
    }
  }
}

// The blocks of inputs [k0, k0 + n) so unpacked, each behind its header.
static void unpack_nibbles(const Packed& m, const uint8_t* column, ptrdiff_t k0, ptrdiff_t n, uint8_t* to) {
  const uint8_t* w = column + bytes_before(m, k0);
  for (ptrdiff_t b = 0; b < n; b += m.block) {
    const ptrdiff_t inputs = imin(m.block, n - b), header = header_bytes(m, inputs);
    __builtin_memcpy(to, w, (size_t)header);
    w += header;
    to += header;
    const ptrdiff_t lines = div_up(inputs, 8);
    unpack_lines(w, lines, to);
    w += lines * 64;
    to += lines * 128;
  }
}
