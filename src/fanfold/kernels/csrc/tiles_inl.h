// Tiles: R columns of 16 outputs times T tokens, their sums in registers. Included by packed_inl.h.

// The memory that a tile asks for while it computes: `step` bytes further with each line of a column that it reads, in
// the second column `pitch` bytes away. A hint may point anywhere.
struct Hint {
  uintptr_t at;
  ptrdiff_t step, pitch;
  // Of integer tiles only: bytes before each block's lines, asked for as well, and the input, the first of a block,
  // from which on it goes on at `then`, because what lies behind the column has been read already. 4 bits: 0.91-0.94 of
  // the time at 1 to 4 tokens; float tiles gained nothing.
  ptrdiff_t header = 0, turn = -1;
  uintptr_t then = 0;

  // What is due in R columns now, and on by `lines` lines.
  template <int R>
  INLINED void ask(ptrdiff_t lines) {
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) __builtin_prefetch((const void*)(at + (uintptr_t)(r * pitch)), 0, 3);
    at += (uintptr_t)(lines * step);
  }
};

// ---- float tiles ----

// Of a column's lines: float32, bfloat16 pairs of inputs, float16, bfloat16 pairs that meet x's pairs whole.
enum Source { kFloats, kPairs, kHalves, kDots };

constexpr ptrdiff_t kChain = W == 16 ? 128 : 64;  // inputs of one float32 sum: rounding grows with their length

// c[t * ldc + r * 16 + lane] += products of `inputs` inputs (whole steps) of R columns and T tokens; = if `fresh`.
template <int R, int T, Source S>
__attribute__((noinline)) static void float_tile(const uint8_t* const* columns, ptrdiff_t inputs, const float* x,
                                                 float* c, ptrdiff_t ldc, bool fresh, const Hint& given) {
  Hint hint = given;  // by reference: a copy for each call would wait for the stores to it
  constexpr int kStep = S == kPairs || S == kDots ? 2 : 1;  // inputs of a line
  constexpr int kLine = S == kHalves ? 32 : 64;             // bytes of it
  constexpr int U = R * T * V >= 8 ? 1 : 8 / (R * T * V);   // chains, so that additions need not wait for each other
  // Steps of an iteration. On AVX2 they are so short that the loop's own instructions, with a hint in each, would take
  // a tenth of the time.
  constexpr int kSteps = U == 1 && W == 8 ? 2 : U;
  const uint8_t* w[R];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) w[r] = columns[r];
  for (ptrdiff_t begin = 0; begin < inputs; begin += kChain, fresh = false) {
    const ptrdiff_t end = imin(inputs, begin + kChain);
    vf acc[U][R][T][V];
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) acc[u][r][t][v] = vf{};
        }
      }
    }
    const auto step = [&](int u, ptrdiff_t k) INLINED {
      vf first[R][V], second[R][V];
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          if constexpr (S == kFloats || S == kDots) {
            first[r][v] = load((const float*)w[r] + v * W);
          } else if constexpr (S == kHalves) {
            first[r][v] = load_half(w[r] + v * W * 2);
          } else {
            first[r][v] = load_first((const uint16_t*)w[r] + v * W * 2);
            second[r][v] = load_second((const uint16_t*)w[r] + v * W * 2);
          }
        }
        w[r] += kLine;
      }
#ifdef FANFOLD_BF16
      if constexpr (S == kDots) {
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
          const vf in = splat(x[k / 2 * T + t]);  // a pair of bfloat16 in 32 bits
#pragma GCC unroll 2
          for (int r = 0; r < R; ++r) {
            acc[u][r][t][0] = (vf)_mm512_dpbf16_ps((__m512)acc[u][r][t][0], (__m512bh)first[r][0], (__m512bh)in);
          }
        }
        return;
      }
#endif
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
        const vf in = splat(x[k * T + t]);
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) acc[u][r][t][v] += first[r][v] * in;
        }
        if constexpr (S == kPairs) {
          const vf next = splat(x[(k + 1) * T + t]);
#pragma GCC unroll 2
          for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) acc[u][r][t][v] += second[r][v] * next;
          }
        }
      }
    };
    ptrdiff_t k = begin;
    const auto iterations = [&](auto once) INLINED {
      for (; k + kSteps * kStep <= end; k += kSteps * kStep) {
        if constexpr (decltype(once)::value) hint.ask<R>(kSteps);
#pragma GCC unroll 8
        for (int i = 0; i < kSteps; ++i) {
          if constexpr (!decltype(once)::value) hint.ask<R>(1);
          step(i % U, k + i * kStep);
        }
      }
    };
    // once an iteration where that leaves no line out
    if (kSteps > U && hint.step * kSteps <= 64) {
      iterations(std::bool_constant<(kSteps > U)>{});
    } else {
      iterations(std::false_type{});
    }
    for (; k < end; k += kStep) {
      hint.ask<R>(1);
      step(0, k);
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          vf sum = acc[0][r][t][v];
#pragma GCC unroll 8
          for (int u = 1; u < U; ++u) sum += acc[u][r][t][v];
          float* const to = c + t * ldc + r * kLanes + v * W;
          store(to, fresh ? sum : load(to) + sum);
        }
      }
    }
  }
}

template <int R, Source S, int Most>
static void float_tiles(ptrdiff_t tokens, const uint8_t* const* columns, ptrdiff_t inputs, const float* x, float* c,
                        ptrdiff_t ldc, bool fresh, const Hint& hint) {
  if constexpr (Most > 1) {
    if (tokens < Most) return float_tiles<R, S, Most - 1>(tokens, columns, inputs, x, c, ldc, fresh, hint);
  }
  float_tile<R, Most, S>(columns, inputs, x, c, ldc, fresh, hint);
}

// The inputs of a line.
INL int line_inputs(const Packed& m) { return m.format == kBf16 ? 2 : 1; }

// c[r * 16 + lane] += the products of one token with the listed lines of R columns: a zero coefficient spares its
// channel's memory.
template <int R, Source S>
static void sparse_tile(const uint8_t* const (&columns)[2], const int32_t* lines, ptrdiff_t n, const float* x,
                        float* c) {
  constexpr int kLine = S == kHalves ? 32 : 64;
  constexpr ptrdiff_t kFar = 16;  // lines asked for in advance
  vf acc[2][R][V] = {};
  const auto step = [&](int u, ptrdiff_t line) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      const uint8_t* const w = columns[r] + line * kLine;
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        if constexpr (S == kFloats) {
          acc[u][r][v] += load((const float*)w + v * W) * x[line];
        } else if constexpr (S == kHalves) {
          acc[u][r][v] += load_half(w + v * W * 2) * x[line];
        } else {
          acc[u][r][v] += load_first((const uint16_t*)w + v * W * 2) * x[2 * line];
          acc[u][r][v] += load_second((const uint16_t*)w + v * W * 2) * x[2 * line + 1];
        }
      }
    }
  };
  ptrdiff_t i = 0;
  for (; i + kFar + 2 <= n; i += 2) {
    for (int r = 0; r < R; ++r) {
      __builtin_prefetch(columns[r] + lines[i + kFar] * kLine, 0, 3);
      __builtin_prefetch(columns[r] + lines[i + kFar + 1] * kLine, 0, 3);
    }
    step(0, lines[i]);
    step(1, lines[i + 1]);
  }
  for (; i < n; ++i) step(0, lines[i]);
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      float* const to = c + r * kLanes + v * W;
      store(to, load(to) + (acc[0][r][v] + acc[1][r][v]));
    }
  }
}

template <int R>
static void sparse_product(const Packed& m, const uint8_t* column, ptrdiff_t pitch, const Inputs& in, float* c) {
  const uint8_t* const columns[2] = {column, column + pitch};
  for (ptrdiff_t i = 0; i < in.n_lines; i += 128) {  // sums as short as elsewhere
    const ptrdiff_t n = imin(128, in.n_lines - i);
    if (m.format == kFp32) {
      sparse_tile<R, kFloats>(columns, in.lines + i, n, in.f, c);
    } else if (m.format == kBf16) {
      sparse_tile<R, kPairs>(columns, in.lines + i, n, in.f, c);
    } else {
      sparse_tile<R, kHalves>(columns, in.lines + i, n, in.f, c);
    }
  }
}

// ---- integer tiles ----

// What the codes of a column are: a byte each; two to a byte, of 4 bits; a byte each, but below 16.
enum Codes { kBytes, kNibbles, kSmall };

// How a column's codes are scaled: once at the end (one scale a row), by groups, or by groups with a minimum.
enum Scaling { kByRow, kByGroup, kByGroupWithMinimum };

struct IntTile {
  const uint8_t* columns[2];  // where the first block begins
  ptrdiff_t inputs;           // whole blocks, but for the matrix's last
  ptrdiff_t group, block;     // inputs
  ptrdiff_t header;           // bytes, of a whole block
  const int8_t* q;            // see Inputs
  const float* scale;
  const int32_t* start;
  const float* sum;
  float* c;
  ptrdiff_t ldc;
  bool fresh;
  Hint hint;
};

// c += or = as in float_tile.
template <int R, int T, Codes C, Scaling S>
__attribute__((noinline)) static void int_tile(const IntTile& tile) {
  // copies: a store to c could change `tile` for all that the compiler knows
  const ptrdiff_t group = tile.group, ldc = tile.ldc;
  const bool tile_fresh = tile.fresh;
  const int8_t* q = tile.q;
  const float* scale_at = tile.scale;
  const float* sum_at = tile.sum;
  const int32_t* start_at = tile.start;
  float* const c = tile.c;
  // Few float sums fit the registers beside the integer ones; many are added to in memory, once a group.
  constexpr bool kKeep = R * T * V <= 8;
  vf kept[kKeep ? R : 1][kKeep ? T : 1][kKeep ? V : 1];
  if constexpr (kKeep) {
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) kept[r][t][v] = tile.fresh ? vf{} : load(c + t * ldc + r * kLanes + v * W);
      }
    }
  }
  const uint8_t* w[R];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) w[r] = tile.columns[r];
  Hint hint = tile.hint;
  // As in float_tile: where many tiles share the hints, one for 32 inputs is enough.
  constexpr bool kMayBeMany = W == 8 && R == 1 && T >= 3 && C != kNibbles;
  const bool many = hint.step * 8 <= 64;
  for (ptrdiff_t k0 = 0; k0 < tile.inputs; k0 += tile.block) {
    const ptrdiff_t inputs = imin(tile.block, tile.inputs - k0), groups = div_up(inputs, group);
    const uint8_t* scales[R];
    const ptrdiff_t header =
        S == kByRow || inputs == tile.block ? tile.header : round_up(groups * (S == kByGroup ? 32 : 64), 64);
    if (k0 == hint.turn) hint.at = hint.then;
    for (ptrdiff_t i = 0; i < hint.header; i += 64, hint.at += 64) {
      for (int r = 0; r < R; ++r) __builtin_prefetch((const void*)(hint.at + (uintptr_t)(r * hint.pitch)), 0, 3);
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      scales[r] = w[r];
      w[r] += header;
    }
    for (ptrdiff_t i = 0; i < groups; ++i, scale_at += T, sum_at += T, start_at += T) {
      vi sum[R][T][V];
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
        const vi start = splat_i(start_at[t]);
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sum[r][t][v] = start;
        }
      }
      const ptrdiff_t n = imin(group, inputs - i * group);
      constexpr int kStep = C == kNibbles ? 8 : 4;
      constexpr bool kSums16 = kByPairs && C != kBytes;  // first summed in 16 bits
      vi pairs[kSums16 ? R : 1][kSums16 ? T : 1][kSums16 ? V : 1];
      const auto add = [&](const vi(&codes)[R][V], const int8_t* x_at) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
          const vi x = splat4(x_at + t * 4);
#pragma GCC unroll 2
          for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
#if FANFOLD_W >= 8 && !defined(FANFOLD_VNNI)
              if constexpr (kSums16) {
                pairs[r][t][v] = add_small(pairs[r][t][v], codes[r][v], x);
              } else {
                sum[r][t][v] = add_pairs(sum[r][t][v], codes[r][v], x);
              }
#else
              sum[r][t][v] = dot4(sum[r][t][v], codes[r][v], x);
#endif
            }
          }
        }
      };
      const auto step = [&]() __attribute__((always_inline)) {
        vi first[R][V], second[R][V];
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) {
            const vi codes = load_i(w[r] + v * W * 4);
            if constexpr (C == kNibbles) {
              first[r][v] = codes & 0x0f0f0f0f;
              second[r][v] = (vi)((vu)codes >> 4) & 0x0f0f0f0f;
#if FANFOLD_W >= 8 && !defined(FANFOLD_VNNI)
            } else if constexpr (C == kBytes) {
              first[r][v] = even_bytes(codes);
              second[r][v] = odd_bytes(codes);
#endif
            } else {
              first[r][v] = codes;
            }
          }
          w[r] += 64;
        }
        add(first, q);
        q += 4 * T;
        if constexpr (C == kNibbles || (kByPairs && C == kBytes)) {
          add(second, q);
          q += 4 * T;
        }
      };
      const auto empty = [&]() __attribute__((always_inline)) {
        if constexpr (kSums16) {
#pragma GCC unroll 2
          for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
              for (int v = 0; v < V; ++v) pairs[r][t][v] = vi{};
            }
          }
        }
      };
      const auto join = [&]() __attribute__((always_inline)) {
#if FANFOLD_W >= 8 && !defined(FANFOLD_VNNI)
        if constexpr (kSums16) {
#pragma GCC unroll 2
          for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
              for (int v = 0; v < V; ++v) sum[r][t][v] += joined(pairs[r][t][v]);
            }
          }
        }
#endif
      };
      ptrdiff_t k = 0;
      static_assert(32 / 4 <= kMostPairs, "as many as 16 bits hold");
      const auto iterations = [&](auto asks) INLINED {
        constexpr int kLines = 32 / kStep / decltype(asks)::value;  // for each hint
        for (; k + 32 <= n; k += 32) {                              // few iterations: their end is foreseen
          empty();
#pragma GCC unroll 8
          for (int i = 0; i < 32 / kStep; ++i) {
            if (i % kLines == 0) hint.ask<R>(kLines);
            step();
          }
          join();
        }
      };
      if (kMayBeMany && many) {
        iterations(std::integral_constant<int, kMayBeMany ? 1 : 32 / kStep>{});
      } else {
        iterations(std::integral_constant<int, 32 / kStep>{});
      }
      if (k < n) {
        empty();
        for (; k < n; k += kStep) {
          hint.ask<R>(1);
          step();
        }
        if constexpr (kSums16) join();
      }
      const auto scaled = [&](auto first) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) {
            const vf scale = S == kByRow ? vf{} : load_half(scales[r] + i * 32 + v * W * 2);
            const vf least = S == kByGroupWithMinimum ? load_half(scales[r] + (groups + i) * 32 + v * W * 2) : vf{};
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) {
              const vf value = __builtin_convertvector(sum[r][t][v], vf);
              const float s = scale_at[t];
              float* const at = c + t * ldc + r * kLanes + v * W;
              vf total;
              if constexpr (kKeep) {
                total = kept[r][t][v];
              } else if constexpr (decltype(first)::value) {
                total = vf{};
              } else {
                total = load(at);
              }
              // s last: for the smallest activations its product with the scale alone would underflow
              total += S == kByRow ? value * s : value * scale * s;
              if constexpr (S == kByGroupWithMinimum) total += least * sum_at[t];
              if constexpr (kKeep) {
                kept[r][t][v] = total;
              } else {
                store(at, total);
              }
            }
          }
        }
      };
      if (!kKeep && tile_fresh && k0 + i == 0) {
        scaled(std::true_type{});
      } else {
        scaled(std::false_type{});
      }
    }
  }
  if constexpr (kKeep) {
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) store(c + t * ldc + r * kLanes + v * W, kept[r][t][v]);
      }
    }
  }
}

template <int R, Codes C, Scaling S, int Most>
static void int_tiles(ptrdiff_t tokens, const IntTile& tile) {
  if constexpr (Most > 1) {
    if (tokens < Most) return int_tiles<R, C, S, Most - 1>(tokens, tile);
  }
  int_tile<R, Most, C, S>(tile);
}

template <int R, Codes C, int Most>
static void int_tiles(ptrdiff_t tokens, const IntTile& tile, Scaling s) {
  if (s == kByGroupWithMinimum) return int_tiles<R, C, kByGroupWithMinimum, Most>(tokens, tile);
  if (s == kByGroup) return int_tiles<R, C, kByGroup, Most>(tokens, tile);
  if constexpr (C == kBytes) int_tiles<R, C, kByRow, Most>(tokens, tile);
}
