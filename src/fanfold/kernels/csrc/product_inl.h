// The products of several columns with all tokens. Included by packed_inl.h.

constexpr ptrdiff_t kSpan = 512;  // most inputs of a step over all tokens: its weights stay in L1, the tokens' in L2
constexpr ptrdiff_t kCodeSpan = 1024;   // … of the matrix unit's codes
constexpr ptrdiff_t kMostColumns = 32;  // of one call, gate's and up's together

// Room for two columns' span in float32, or unpacked with its headers.
constexpr size_t kScratchBytes = 2 * (kSpan + 256) * kLanes * sizeof(float);

// Columns of one or two matrices of the same format and inputs, in the order in which they are read.
struct Task {
  const Packed* matrix[kMostColumns];
  ptrdiff_t column[kMostColumns];
  float* out[kMostColumns];  // [tokens][ldc]
  ptrdiff_t count;           // of pairs if `pair`, else of columns
  bool pair;                 // each entry is two neighbouring columns; else see kAlwaysPairs
  ptrdiff_t ldc;
};

INL const uint8_t* column_at(const Task& task, ptrdiff_t i) {
  return task.matrix[i]->columns + task.column[i] * task.matrix[i]->column_bytes;
}

#ifdef FANFOLD_AMX
// As span_product on the matrix unit. A column of bfloat16 is read as it lies but for a last, partly filled tile.
static void span_product_rows(const Packed& m, const uint8_t* column, ptrdiff_t pitch, const uint8_t* next,
                              ptrdiff_t k0, ptrdiff_t n, const Inputs& in, float* c, ptrdiff_t ldc, uint8_t* scratch) {
  const ptrdiff_t whole = n / kTileInputs * kTileInputs;
  const uint8_t *at[2] = {}, *rest[2] = {};
  for (int r = 0; r < 2; ++r) {
    uint8_t* const to = scratch + (size_t)r * (kScratchBytes / 2);
    at[r] = column + r * pitch + bytes_before(m, k0);
    rest[r] = to;
    if (whole < n) {
      const size_t bytes = (size_t)div_up(n - whole, 2) * 64;
      __builtin_memcpy(to, at[r] + whole * 32, bytes);
      __builtin_memset(to + bytes, 0, 1024 - bytes);
    }
  }
  RowHint hint(m, next, k0, n, in.tokens, kTileInputs);
  for (ptrdiff_t t = 0; t < in.tokens; t += kTileTokens) {
    const uint16_t* const x = in.b + t * in.ld + k0;
    const auto both = [&](auto two) __attribute__((always_inline)) {
      constexpr bool kTwo = decltype(two)::value;
      const NothingBefore none;
      if (whole > 0) row_tile<kTwo>(at, whole, x, in.ld, c + t * ldc, ldc, k0 == 0, &hint, none);
      if (whole == n) return;
      row_tile<kTwo>(rest, n - whole, x + whole, in.ld, c + t * ldc, ldc, k0 + whole == 0, &hint, none);
    };
    in.tokens - t > 16 ? both(std::true_type{}) : both(std::false_type{});
  }
}

// The same of codes: they become bfloat16 while they meet the first tokens.
template <int Bits, bool ByRow>
static void span_product_narrowed(const Packed& m, const uint8_t* column, ptrdiff_t pitch, const uint8_t* next,
                                  ptrdiff_t k0, ptrdiff_t n, const Inputs& in, float* c, ptrdiff_t ldc,
                                  uint8_t* scratch) {
  const uint8_t* const at[2] = {scratch, scratch + kScratchBytes / 2};
  Narrowing<Bits, ByRow> narrowing(m, column, pitch, k0, n, (uint16_t*)scratch, kScratchBytes / 2 / sizeof(uint16_t));
  RowHint hint(m, next, k0, n, in.tokens, kTileInputs);
  for (ptrdiff_t t = 0; t < in.tokens; t += kTileTokens) {
    const uint16_t* const x = in.b + t * in.ld + k0;
    const auto all = [&](auto two, auto before) __attribute__((always_inline)) {
      row_tile<decltype(two)::value>(at, n, x, in.ld, c + t * ldc, ldc, k0 == 0, &hint, before);
    };
    const bool two = in.tokens - t > 16;
    if (t == 0) {
      const auto before = [&]() __attribute__((always_inline)) { narrowing(); };
      two ? all(std::true_type{}, before) : all(std::false_type{}, before);
    } else {
      two ? all(std::true_type{}, NothingBefore{}) : all(std::false_type{}, NothingBefore{});
    }
  }
}

// The groups of inputs [k0, k0 + n) of both columns, as bytes in whole tiles: where they lie, or else in `room`.
static ptrdiff_t code_groups(const Packed& m, const uint8_t* column, ptrdiff_t pitch, ptrdiff_t k0, ptrdiff_t n,
                             uint8_t* room, CodeGroup* groups) {
  ptrdiff_t count = 0;
  for (ptrdiff_t b = 0; b < n; b += m.block) {
    const ptrdiff_t in_block = imin(m.block, n - b), header = header_bytes(m, in_block);
    const uint8_t* const block = column + bytes_before(m, k0 + b);
    const ptrdiff_t of_block = div_up(in_block, m.activation_group);
    for (ptrdiff_t i = 0; i < of_block; ++i) {
      const ptrdiff_t first = i * m.activation_group, inputs = imin(m.activation_group, in_block - first);
      CodeGroup& group = groups[count++];
      group.k = b + first;
      group.steps = div_up(inputs, kTileCodes);
      group.table = (k0 + group.k) / m.activation_group;
      for (int r = 0; r < 2; ++r) {
        const uint8_t* const at = block + r * pitch;
        const uint8_t* const codes = at + header + first * kLanes * m.bits / 8;
        group.scales[r] = at + i * 32;
        group.minima[r] = at + (of_block + i) * 32;
        group.codes[r] = codes;
        // A last, partly filled tile must not be read where it lies: the matrix may end there. What the copy has behind
        // it meets codes of zero.
        const ptrdiff_t unit = 32 / m.bits, own = round_up(inputs, unit) * kLanes;
        if (m.bits == 8 && own == group.steps * 1024) continue;
        uint8_t* const to = room + (size_t)r * (kScratchBytes / 4) + group.k * kLanes;
        if (m.bits == 4) {
          unpack_lines(codes, own / 128, to);
        } else {
          __builtin_memcpy(to, codes, (size_t)own);
        }
        group.codes[r] = to;
      }
    }
  }
  return count;
}

// The same with codes. The sums of an activation group are exact.
template <Scaling S>
static void span_product_codes(const Packed& m, const uint8_t* column, ptrdiff_t pitch, const uint8_t* next,
                               ptrdiff_t k0, ptrdiff_t n, const Inputs& in, float* c, ptrdiff_t ldc, uint8_t* scratch) {
  CodeGroup groups[kCodeSpan / kTileCodes];
  const ptrdiff_t n_groups = code_groups(m, column, pitch, k0, n, scratch, groups);
  uint8_t* const rooms = scratch + kScratchBytes / 2;
  RowHint hint(m, next, k0, n, in.tokens, kTileCodes);
  Waiting waiting;
  int room = 0;
  for (ptrdiff_t t = 0; t < in.tokens; t += kTileTokens) {
    const bool two = in.tokens - t > 16;
    const int8_t* const x = in.q + t * in.ld + k0;
    for (ptrdiff_t g = 0; g < n_groups; ++g, room ^= 1) {
      const CodeGroup& group = groups[g];
      uint8_t* const sums = rooms + room * 4096;
      if (two) {
        code_tile<S, true>(group, x, in.ld, ldc, sums, &waiting, &hint);
      } else {
        code_tile<S, false>(group, x, in.ld, ldc, sums, &waiting, &hint);
      }
      const ptrdiff_t entries = in.entries(group.table, t, 0);
      waiting = {sums,
                 two ? 4 : 2,
                 0,
                 in.scale + entries,
                 in.sum + entries,
                 in.start + entries,
                 {group.scales[0], group.scales[1]},
                 {group.minima[0], group.minima[1]},
                 c + t * ldc};
    }
  }
  while (waiting.done < waiting.tiles) settle<S>(&waiting, ldc);
}
#endif

// One entry's span [k0, k0 + n) with every group of tokens; meanwhile memory is asked for `next`, which is as long. The
// first span's sums are written to c, the others' added, but those of kCodeRowMode. pitch: from a column to the second.
template <int R>
static void span_product(const Packed& m, const uint8_t* column, ptrdiff_t pitch, const uint8_t* next, ptrdiff_t k0,
                         ptrdiff_t n, const Inputs& in, float* c, ptrdiff_t ldc, uint8_t* scratch) {
#ifdef FANFOLD_AMX
  if (in.mode == kRowMode || in.mode == kCodeRowMode) {
    const auto product = in.mode == kRowMode ? m.format == kBf16 ? span_product_rows
                                               : m.bits == 4     ? span_product_narrowed<4, false>
                                               : m.group == 0    ? span_product_narrowed<8, true>
                                                                 : span_product_narrowed<8, false>
                         : m.group == 0      ? span_product_codes<kByRow>
                         : m.minimum         ? span_product_codes<kByGroupWithMinimum>
                                             : span_product_codes<kByGroup>;
    return product(m, column, pitch, next, k0, n, in, c, ldc, scratch);
  }
#endif
  const ptrdiff_t groups = in.groups(), bytes = bytes_before(m, k0 + n) - bytes_before(m, k0);
  const bool ints = in.mode == kInt8Mode, nibbles = m.bits == 4;
  // what tokens share is unpacked for all of them once they are many
  const bool direct =
      ints ? !nibbles || groups <= 2 : in.mode == kDotMode || m.format == kFp32 || (groups <= 2 && !m.is_integer());
  const uint8_t* at[2];
  for (int r = 0; r < R; ++r) {
    at[r] = column + r * pitch + bytes_before(m, k0);
    if (direct) continue;
    uint8_t* const to = scratch + (size_t)r * (kScratchBytes / 2);
    if (ints) {
      unpack_nibbles(m, column + r * pitch, k0, n, to);
    } else {
      expand(m, column + r * pitch, k0, n, (float*)to);
    }
    at[r] = to;
  }
  const int per_line = ints ? (nibbles && direct ? 8 : 4) : direct && m.format == kBf16 ? 2 : 1;
  const ptrdiff_t lines = div_up(n, per_line);
  // A lone group has nothing else to do meanwhile, the others ask for a share each.
  const bool ahead = groups == 1 && direct;
  const ptrdiff_t share = bytes / groups, table = k0 / m.activation_group;
  Hint hint = {0, share / lines, m.column_bytes};
  if (ahead && ints) {
    hint.step = 64;
    hint.header = header_bytes(m, m.block);
    const ptrdiff_t block_bytes = hint.header + m.block * kLanes * m.bits / 8;
    const ptrdiff_t before = imax(div_up(bytes - kAheadBytes, block_bytes), 0);  // blocks
    hint.turn = before * m.block;
    hint.then = (uintptr_t)next + (uintptr_t)(before * block_bytes + kAheadBytes - bytes);
  }
  IntTile tile = {};
  if (ints) {
    for (int r = 0; r < R; ++r) tile.columns[r] = at[r];
    tile.inputs = n;
    tile.group = m.activation_group;
    tile.block = m.block;
    tile.header = header_bytes(m, m.block);
    tile.ldc = ldc;
    tile.fresh = k0 == 0;
  }
  const ptrdiff_t fewer = in.tokens / groups, rest = in.tokens % groups;
  for (ptrdiff_t g = 0, t0 = 0, T, beyond = 0; g < groups; ++g, t0 += T) {
    T = fewer + ((beyond += rest) >= groups);  // to in.begin(g + 1, groups), without a division
    beyond -= T > fewer ? groups : 0;
    hint.at = (uintptr_t)(ahead ? at[0] + kAheadBytes : next) + (uintptr_t)(g * share);
    float* const to = c + t0 * ldc;
    if (ints) {
      const ptrdiff_t entry = in.entries(table, t0, T);
      tile.q = in.q + (t0 * in.ld + k0 * T) * in.code_bytes;
      tile.scale = in.scale + entry;
      tile.start = in.start + entry;
      tile.sum = in.sum + entry;
      tile.c = to;
      tile.hint = hint;
      const Scaling scaling = m.group == 0 ? kByRow : m.minimum ? kByGroupWithMinimum : kByGroup;
      constexpr int kMost = R == 2 ? kIntPairTokens : kIntOneTokens, kMostSmall = R == 2 ? kSmallPairTokens : kMost;
      if (nibbles && direct) {
        int_tiles<R, kNibbles, kMostSmall>(T, tile, scaling);
      } else if (nibbles && kByPairs) {
        if constexpr (kByPairs) int_tiles<R, kSmall, kMostSmall>(T, tile, scaling);
      } else {
        int_tiles<R, kBytes, kMost>(T, tile, scaling);
      }
      continue;
    }
    constexpr int kMost = R == 2 ? kPairTokens : kOneTokens;
    const float* const x =
        in.mode == kDotMode ? (const float*)(in.b + t0 * in.ld + k0 * T) : in.f + t0 * in.ld + k0 * T;
    if (in.mode == kDotMode) {
#ifdef FANFOLD_BF16
      float_tiles<R, kDots, kMost>(T, at, n, x, to, ldc, k0 == 0, hint);
#endif
    } else if (!direct || m.format == kFp32) {
      float_tiles<R, kFloats, kMost>(T, at, n, x, to, ldc, k0 == 0, hint);
    } else if (m.format == kBf16) {
      float_tiles<R, kPairs, kMost>(T, at, n, x, to, ldc, k0 == 0, hint);
    } else {
      float_tiles<R, kHalves, kMost>(T, at, n, x, to, ldc, k0 == 0, hint);
    }
  }
}

// Row scales and biases of `width` outputs from n0 on.
static void finish_rows(const Packed& m, ptrdiff_t n0, ptrdiff_t width, ptrdiff_t tokens, float* c, ptrdiff_t ldc) {
  if (m.row_scale == nullptr && m.bias == nullptr) return;
  for (ptrdiff_t i = 0; i < width; i += W) {
    const ptrdiff_t n = n0 + i;
    const vf scale = m.row_scale != nullptr ? load(m.row_scale + n) : splat(1.0f);
    vf bias = {};
    if (m.bias != nullptr && n < m.n) bias = n + W <= m.n ? load(m.bias + n) : load_part(m.bias + n, m.n - n);
    for (ptrdiff_t t = 0; t < tokens; ++t) store(c + t * ldc + i, load(c + t * ldc + i) * scale + bias);
  }
}

static void finish_task(const Task& task, const Inputs& in, ptrdiff_t width) {
  for (ptrdiff_t i = 0; i < task.count; ++i) {
    finish_rows(*task.matrix[i], task.column[i] * kLanes, width, in.tokens, task.out[i], task.ldc);
  }
}

// The inputs of a step: whole blocks. A lone group of tokens needs no steps for its codes.
INL ptrdiff_t span_of(const Packed& m, const Inputs& in) {
  if (in.mode == kInt8Mode && in.groups() == 1) return round_up(m.k, m.block);
  if (in.mode == kRowMode && m.format == kBf16) {  // the weights take a third of L1, the last step is no stub
    return round_up(div_up(m.k, div_up(m.k, 320)), 32);
  }
  if (in.mode == kRowMode) return 512 / m.block * m.block;  // as bfloat16 it fits the scratch
  if (in.mode == kCodeRowMode) {                            // what is unpacked for few tokens must still be in L1
    return (m.bits == 4 && in.groups() <= 2 ? kCodeSpan / 4 : kCodeSpan) / m.block * m.block;
  }
  ptrdiff_t most = W == 16 && m.bits == 32 && in.groups() > 1 ? 128 : 256;
  if (in.mode == kInt8Mode) most = kByPairs && m.bits == 8 ? 2 * kSpan : kSpan;  // longer: fewer calls of short tiles
  return imax(most / m.block, 1) * m.block;
}

// All entries' outputs, biases included; rows beyond n give zeros. `next`: what will be read after them.
static void product(const Task& task, const Inputs& in, const uint8_t* next, uint8_t* scratch) {
  const Packed& m = *task.matrix[0];
  const ptrdiff_t span = span_of(m, in), width = task.pair ? 2 * kLanes : kLanes;
  const ptrdiff_t pitch = task.pair ? m.column_bytes : 0;
  const bool sparse = in.lines != nullptr, two = task.pair || kAlwaysPairs;
  for (ptrdiff_t i = 0; i < task.count && (sparse || in.mode == kCodeRowMode || m.k == 0); ++i) {
    for (ptrdiff_t t = 0; t < in.tokens; ++t) {
      for (ptrdiff_t j = 0; j < (two ? 2 * kLanes : kLanes); j += W) store(task.out[i] + t * task.ldc + j, vf{});
    }
  }
  if (sparse) {
    for (ptrdiff_t i = 0; i < task.count; ++i) {
      if (two) {
        if constexpr (kPairTokens > 0) sparse_product<2>(*task.matrix[i], column_at(task, i), pitch, in, task.out[i]);
      } else {
        if constexpr (!kAlwaysPairs) sparse_product<1>(*task.matrix[i], column_at(task, i), 0, in, task.out[i]);
      }
    }
    return finish_task(task, in, width);
  }
  // Few tokens: columns one after the other, as they lie in memory; many: what they share stays in L2.
  const ptrdiff_t outer = in.groups() == 1 ? task.count : 1, inner = task.count / outer;
  for (ptrdiff_t o = 0; o < outer; ++o) {
    for (ptrdiff_t k0 = 0; k0 < m.k; k0 += span) {
      const ptrdiff_t n = imin(span, m.k - k0);
      for (ptrdiff_t j = 0; j < inner; ++j) {
        const ptrdiff_t i = o * inner + j;
        const uint8_t* then = next;
        if (j + 1 < inner) {
          then = column_at(task, i + 1) + bytes_before(m, k0);
        } else if (k0 + span < m.k) {
          then = column_at(task, o * inner) + bytes_before(m, k0 + span);
        } else if (o + 1 < outer) {
          then = column_at(task, i + 1);
        }
        const uint8_t* const at = column_at(task, i);
        if (two) {
          if constexpr (kPairTokens > 0) {
            span_product<2>(m, at, pitch, then, k0, n, in, task.out[i], task.ldc, scratch);
          }
        } else {
          if constexpr (!kAlwaysPairs) span_product<1>(m, at, 0, then, k0, n, in, task.out[i], task.ldc, scratch);
        }
      }
    }
  }
  finish_task(task, in, width);
}
