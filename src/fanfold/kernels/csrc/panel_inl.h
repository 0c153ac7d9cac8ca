// The form for many tokens (prefill). Inputs lie transposed, in panels of NR tokens: panel[k][NR], so that a vector
// holds one input of W tokens and the weights are the broadcast factor. They need no transposing of their own, only a
// row copy (which widens bfloat16) into a tile of MR rows x kc inputs that stays in L1 for every panel of the block;
// and the coefficients come out in the layout that the second half wants.

constexpr int MR = FANFOLD_MR, NV = 2, NR = NV * W;
constexpr ptrdiff_t kInputs = 512;                     // most inputs of one tile
constexpr ptrdiff_t kRowPitch = kInputs + 16;          // a power of two would put all MR rows into one cache set
constexpr ptrdiff_t kColPitch = (MR + W - 1) / W * W;  // of a transposed matrix' tile: [kc][kColPitch]
constexpr ptrdiff_t kTilePitch = kInputs * kColPitch + 16;
constexpr ptrdiff_t kBlockTokens = 256;  // tokens whose inputs (kInputs of them) fit L2
constexpr ptrdiff_t kMaxTiles = 8;       // of one task

// The memory of the next tile, asked for while this one is multiplied: `rows` lines for each kChunk inputs.
struct Hint {
  uintptr_t at = 0;
  ptrdiff_t rows = 0, row_bytes = 0, chunk_bytes = 0;
};
constexpr ptrdiff_t kChunk = 16;
constexpr ptrdiff_t kPanelChain = 128;  // inputs of one float32 sum: rounding grows with their length; see kChain

// c[MR][NR] (+)= tile * panel; V of the panel's NV vectors.
template <int V, bool Transposed>
static void micro(const float* a, const float* b, ptrdiff_t kc, float* c, bool first, Hint hint) {
  for (ptrdiff_t begin = 0; begin < kc; begin += kPanelChain, first = false) {
    const ptrdiff_t end = imin(kc, begin + kPanelChain);
    vf acc[MR][V] = {};
    for (ptrdiff_t k0 = begin; k0 < end; k0 += kChunk) {
      for (ptrdiff_t i = 0; i < hint.rows; ++i) {
        __builtin_prefetch((const void*)(hint.at + (uintptr_t)(i * hint.row_bytes)), 0, 2);
      }
      hint.at += (uintptr_t)hint.chunk_bytes;
      const ptrdiff_t k1 = imin(end, k0 + kChunk);
      for (ptrdiff_t k = k0; k < k1; ++k) {
        vf in[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) in[v] = load(b + k * NR + v * W);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
          const float w = Transposed ? a[k * kColPitch + r] : a[r * kRowPitch + k];
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v) acc[r][v] += in[v] * w;
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        float* const to = c + r * NR + v * W;
        store(to, first ? acc[r][v] : load(to) + acc[r][v]);
      }
    }
  }
}

// MR rows (n of them exist) of a row-major matrix: [MR][kRowPitch].
template <class WT>
static void pack_rows(const Matrix& m, ptrdiff_t n0, ptrdiff_t n, ptrdiff_t k0, ptrdiff_t kc, float* a) {
  const ptrdiff_t whole = kc - kc % W;
  for (ptrdiff_t r = 0; r < MR; ++r, a += kRowPitch) {
    if (r >= n) {
      for (ptrdiff_t k = 0; k < kc; ++k) a[k] = 0.0f;
      continue;
    }
    const WT* const from = (const WT*)m.data + (n0 + r) * m.stride + k0;
    for (ptrdiff_t k = 0; k < whole; k += W) store(a + k, load(from + k));
    for (ptrdiff_t k = whole; k < kc; ++k) a[k] = widen(from[k]);
  }
}

// n outputs of a transposed matrix, all tiles of a task at once, because its memory is contiguous that way:
// [tiles] at kTilePitch of [kc][kColPitch].
template <class WT>
static void pack_columns(const Matrix& m, ptrdiff_t n0, ptrdiff_t n, ptrdiff_t N, ptrdiff_t k0, ptrdiff_t kc,
                         float* a) {
  const uintptr_t ahead = (uintptr_t)(16 * m.stride) * sizeof(WT);
  for (ptrdiff_t k = 0; k < kc; ++k, a += kColPitch) {
    const WT* const from = (const WT*)m.data + (k0 + k) * m.stride + n0;
    for (ptrdiff_t i = 0; i < n; i += MR) {
      float* const to = a + i / MR * kTilePitch;
      __builtin_prefetch((const void*)((uintptr_t)(from + i) + ahead), 0, 2);
      if (n0 + i + kColPitch <= N) {  // whole vectors may be read; the surplus is not used
        for (ptrdiff_t r = 0; r < kColPitch; r += W) store(to + r, load(from + i + r));
      } else {
        for (ptrdiff_t r = 0; r < kColPitch; ++r) to[r] = r < n - i ? widen(from[i + r]) : 0.0f;
      }
    }
  }
}

struct PanelPlan {
  ptrdiff_t block;                 // tokens of a block
  ptrdiff_t panels;                // of a block
  ptrdiff_t up_tiles, down_tiles;  // of one task
  size_t tile_floats, x_floats, m_floats, shared, each;
};

// As many tiles as leave a dozen tasks a thread, for balance; of a transposed matrix some more, for longer reads.
// Results do not depend on it.
INL ptrdiff_t tiles_per_task(const Matrix& m, ptrdiff_t outputs, int threads) {
  const ptrdiff_t share = div_up(outputs, MR) / (m.transposed ? 4 : 12) / threads;
  return imin(imax(share, 1), kMaxTiles);
}

static PanelPlan panel_plan(const Call& c) {
  PanelPlan p;
  const ptrdiff_t blocks = div_up(c.tokens, kBlockTokens);
  p.block = round_up(div_up(c.tokens, blocks), NR);  // even blocks: no small one at the end
  p.panels = p.block / NR;
  p.up_tiles = tiles_per_task(c.up, c.d_ff, c.threads);
  p.down_tiles = tiles_per_task(c.down, c.d_out, c.threads);
  p.x_floats = c.up.data != nullptr ? (size_t)(p.block * c.d_model) : 0;
  p.m_floats = (size_t)(p.block * c.d_ff);
  p.shared = p.x_floats + p.m_floats;
  const ptrdiff_t most = imax(p.up_tiles, p.down_tiles);
  p.tile_floats = (size_t)imax(MR * kRowPitch, c.up.transposed || c.down.transposed ? most * kTilePitch : 0);
  p.each = p.tile_floats + (size_t)(2 * most * MR * p.block);
  return p;
}

// W tokens from t0 on (nt of them exist) x inputs [k0, k1) into one vector column of a panel.
template <class XT>
static void pack_tokens(const XT* x, ptrdiff_t stride, ptrdiff_t nt, ptrdiff_t k0, ptrdiff_t k1, float* panel) {
  for (ptrdiff_t k = k0; k < k1; k += W) {
    const ptrdiff_t n = imin(W, k1 - k);
    vf rows[W];
    for (ptrdiff_t t = 0; t < W; ++t) {
      const XT* const from = x + t * stride + k;
      rows[t] = t >= nt ? vf{} : n == W ? load(from) : load_part(from, n);
    }
    transpose(rows);
    for (ptrdiff_t i = 0; i < n; ++i) store(panel + (k + i) * NR, rows[i]);
  }
}

// Number `task` of pack_tasks(): a vector of tokens times a run of inputs.
constexpr ptrdiff_t kPackRun = 256;
INL ptrdiff_t pack_tasks(ptrdiff_t tokens, ptrdiff_t K) { return div_up(tokens, W) * div_up(K, kPackRun); }
static void pack_inputs(const Call& c, ptrdiff_t first, ptrdiff_t tokens, ptrdiff_t K, float* panels, ptrdiff_t task) {
  const ptrdiff_t runs = div_up(K, kPackRun);
  const ptrdiff_t t0 = task / runs * W, k0 = task % runs * kPackRun, k1 = imin(K, k0 + kPackRun);
  float* const panel = panels + t0 / NR * NR * K + t0 % NR;
  const ptrdiff_t nt = imin(W, tokens - t0), at = (first + t0) * c.x_stride;
  if (c.x_dtype == kFloat32) return pack_tokens((const float*)c.x + at, c.x_stride, nt, k0, k1, panel);
  pack_tokens((const uint16_t*)c.x + at, c.x_stride, nt, k0, k1, panel);
}

template <bool Transposed>
static void multiply(const float* tile, const float* in, ptrdiff_t K, ptrdiff_t k0, ptrdiff_t kc, ptrdiff_t tokens,
                     float* c, Hint hint) {
  for (ptrdiff_t t = 0; t < tokens; t += NR) {
    const float* const b = in + t * K + k0 * NR;
    if (tokens - t <= W) {
      micro<1, Transposed>(tile, b, kc, c + t * MR, k0 == 0, hint);
    } else {
      micro<NV, Transposed>(tile, b, kc, c + t * MR, k0 == 0, hint);
    }
    hint = Hint();
  }
}

template <class WT>
static Hint hint_at(const Matrix& m, ptrdiff_t n0, ptrdiff_t k0) {
  const ptrdiff_t size = (ptrdiff_t)sizeof(WT), row_bytes = m.stride * size;
  const ptrdiff_t offset = m.transposed ? k0 * row_bytes + n0 * size : n0 * row_bytes + k0 * size;
  Hint h;
  h.at = (uintptr_t)m.data + (uintptr_t)offset;
  h.rows = m.transposed ? kChunk : MR;
  h.row_bytes = row_bytes;
  h.chunk_bytes = kChunk * (m.transposed ? row_bytes : size);
  return h;
}

// The products of one task for one or two matrices: out[] hold [tiles][panels][MR][NR]. The order of the sum over the
// inputs is fixed by K alone.
template <class WT>
static void panel_product(const Matrix* const (&matrices)[2], float* const (&out)[2], ptrdiff_t n0, ptrdiff_t n,
                          ptrdiff_t N, const float* in, ptrdiff_t K, ptrdiff_t tokens, float* tile) {
  const ptrdiff_t count = matrices[1] != nullptr ? 2 : 1, tile_out = MR * round_up(tokens, NR);
  const ptrdiff_t blocks = div_up(K, kInputs), step = round_up(div_up(K, blocks), W);
  const ptrdiff_t tiles = div_up(n, MR) * count, all = div_up(K, step) * tiles;
  const auto inputs = [=](ptrdiff_t s) { return s / tiles * step; };
  const auto row = [=](ptrdiff_t s) { return s % tiles / count * MR; };
  for (ptrdiff_t s = 0; s < all && !matrices[0]->transposed; ++s) {
    const ptrdiff_t k0 = inputs(s), kc = imin(step, K - k0), i = row(s);
    pack_rows<WT>(*matrices[s % count], n0 + i, imin(MR, n - i), k0, kc, tile);
    Hint hint;
    if (s + 1 < all) hint = hint_at<WT>(*matrices[(s + 1) % count], n0 + row(s + 1), inputs(s + 1));
    multiply<false>(tile, in, K, k0, kc, tokens, out[s % count] + i / MR * tile_out, hint);
  }
  for (ptrdiff_t k0 = 0; k0 < K && matrices[0]->transposed; k0 += step) {
    const ptrdiff_t kc = imin(step, K - k0);
    for (ptrdiff_t which = 0; which < count; ++which) {
      pack_columns<WT>(*matrices[which], n0, n, N, k0, kc, tile);
      for (ptrdiff_t i = 0; i * MR < n; ++i) {
        const ptrdiff_t next = which + 1 < count ? k0 : k0 + step;
        Hint hint;
        if (next < K) hint = hint_at<WT>(*matrices[(which + 1) % count], n0 + i * MR, next);
        multiply<true>(tile + i * kTilePitch, in, K, k0, kc, tokens, out[which] + i * tile_out, hint);
      }
    }
  }
}

static void add_bias(const void* bias, DType dtype, ptrdiff_t n0, ptrdiff_t n, ptrdiff_t panels, float* c) {
  if (bias == nullptr) return;
  for (ptrdiff_t i = 0; i < n; ++i) {
    const float b = bias_at(bias, dtype, n0 + i);
    for (ptrdiff_t p = 0; p < panels; ++p) {
      float* const row = c + ((i / MR * panels + p) * MR + i % MR) * NR;
      for (int v = 0; v < NR; v += W) store(row + v, load(row + v) + b);
    }
  }
}

template <class WT>
static void panel_up(const Call& c, const PanelPlan& p, const float* x, float* m, float* own, ptrdiff_t tokens,
                     ptrdiff_t f0) {
  const ptrdiff_t n = imin(p.up_tiles * MR, c.d_ff - f0), panels = div_up(tokens, NR);
  const bool gated = c.gate.data != nullptr;
  float* const up = own + p.tile_floats;
  float* const gate = up + p.up_tiles * MR * p.block;
  panel_product<WT>({&c.up, gated ? &c.gate : nullptr}, {up, gate}, f0, n, c.d_ff, x, c.d_model, tokens, own);
  if (gated) add_bias(c.gate.bias, c.w_dtype, f0, n, panels, gate);
  add_bias(c.up.bias, c.w_dtype, f0, n, panels, up);
  for (ptrdiff_t i = 0; i < n; i += MR) {
    const ptrdiff_t from = i * panels * NR, rows = imin(MR, n - i) * NR;
    // in both, the rows of a tile lie together, for one panel after the other
    coefficients(c, gated, gate + from, up + from, MR * NR, panels, rows, m + (f0 + i) * NR, c.d_ff * NR);
  }
}

template <class YT>
static void store_tokens(YT* y, ptrdiff_t stride, ptrdiff_t tokens, ptrdiff_t n, ptrdiff_t panels, const float* c) {
  for (ptrdiff_t t0 = 0; t0 < tokens; t0 += W) {
    const ptrdiff_t nt = imin(W, tokens - t0);
    for (ptrdiff_t i0 = 0; i0 < n; i0 += W) {
      const ptrdiff_t ni = imin(W, n - i0);
      vf rows[W];
      for (ptrdiff_t i = 0; i < W; ++i) {
        const ptrdiff_t r = i0 + imin(i, ni - 1);
        rows[i] = load(c + ((r / MR * panels + t0 / NR) * MR + r % MR) * NR + t0 % NR);
      }
      transpose(rows);
      for (ptrdiff_t t = 0; t < nt; ++t) {
        YT* const to = y + (t0 + t) * stride + i0;
        if (ni == W) {
          put(to, rows[t]);
        } else {
          float part[W];
          store(part, rows[t]);
          for (ptrdiff_t i = 0; i < ni; ++i) put(to + i, part[i]);
        }
      }
    }
  }
}

template <class WT>
static void panel_down(const Call& c, const PanelPlan& p, const float* m, float* own, ptrdiff_t first, ptrdiff_t tokens,
                       ptrdiff_t d0) {
  const ptrdiff_t n = imin(p.down_tiles * MR, c.d_out - d0), panels = div_up(tokens, NR);
  float* const out = own + p.tile_floats;
  panel_product<WT>({&c.down, nullptr}, {out, nullptr}, d0, n, c.d_out, m, c.d_ff, tokens, own);
  add_bias(c.down.bias, c.w_dtype, d0, n, panels, out);
  const ptrdiff_t at = first * c.y_stride + d0;
  if (c.y_dtype == kFloat32) return store_tokens((float*)c.y + at, c.y_stride, tokens, n, panels, out);
  store_tokens((uint16_t*)c.y + at, c.y_stride, tokens, n, panels, out);
}
