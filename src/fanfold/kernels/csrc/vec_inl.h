// Vectors of FANFOLD_W floats by the compilers' vector extensions. Included by ffn_inl.h only, once for each
// instruction set, inside its namespace: nothing here may have external linkage, or the linker could hand the AVX-512
// copy of a function to the baseline code.

#define INL static inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))  // of a lambda

// What an asm statement says of a vector that is to be computed just as it stands: where the value is.
#if defined(FANFOLD_EMULATED)
#define HELD "m"  // no register is wide enough
#elif FANFOLD_W == 16
#define HELD "v"
#else
#define HELD "x"
#endif

constexpr int W = FANFOLD_W;

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef float vf_half __attribute__((vector_size(2 * W)));
typedef double vd __attribute__((vector_size(4 * W)));

INL ptrdiff_t imin(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
INL ptrdiff_t imax(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }
INL ptrdiff_t div_up(ptrdiff_t a, ptrdiff_t b) { return (a + b - 1) / b; }
INL ptrdiff_t round_up(ptrdiff_t a, ptrdiff_t b) { return div_up(a, b) * b; }

INL vf splat(float s) { return s - vf{}; }  // s + 0 would be an addition of its own, for -0; s - 0 is s
INL vi splat_i(int32_t s) { return vi{} + s; }

// memcpy: the pointers come from tensors and may have any alignment.
INL vf load(const float* p) {
  vf v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
INL vf load(const uint16_t* p) {  // bfloat16 is the upper half of a float32
  vh h;
  __builtin_memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
}
INL void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }

template <class T>
INL vf load_part(const T* p, ptrdiff_t n) {  // n <= W elements, then zeros; reads nothing beyond them
  T part[W] = {};
  for (ptrdiff_t i = 0; i < n; ++i) part[i] = p[i];
  return load(part);
}

// The two halves of 2 W elements, in the order in which they are cheapest to widen: see pair_position.
INL vf load_first(const float* p) { return load(p); }
INL vf load_second(const float* p) { return load(p + W); }
INL vf load_first(const uint16_t* p) {  // each 32-bit lane holds two neighbours: the even one below (little endian)
  vu two;
  __builtin_memcpy(&two, p, sizeof two);
  return (vf)(two << 16);
}
INL vf load_second(const uint16_t* p) {
  vu two;
  __builtin_memcpy(&two, p, sizeof two);
  return (vf)(two & 0xffff0000u);
}

// Where load_first and load_second put element k of a row: bfloat16 rows come as evens then odds of each 2 W elements.
// The other factor of a dot product is stored in that order once, which spares two shuffles a load of weights.
template <class T>
INL ptrdiff_t pair_position(ptrdiff_t k) {
  if (sizeof(T) == 4) return k;
  const ptrdiff_t in = k % (2 * W);
  return k - in + in / 2 + (in % 2) * W;
}

INL float widen(float v) { return v; }
INL float widen(uint16_t v) {
  const uint32_t bits = (uint32_t)v << 16;
  float f;
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
}

INL uint16_t to_bf16(float f) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  __builtin_memcpy(&bits, &f, sizeof bits);
  if (f != f) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INL vh to_bf16(vf v) {
  const vu bits = (vu)v;
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vu nan = (bits >> 16) | 0x40;
  return __builtin_convertvector((vu)(v != v ? (vi)nan : (vi)rounded), vh);
}

INL void put(float* p, float v) { *p = v; }
INL void put(uint16_t* p, float v) { *p = to_bf16(v); }
INL void put(float* p, vf v) { store(p, v); }
INL void put(uint16_t* p, vf v) {
  const vh h = to_bf16(v);
  __builtin_memcpy(p, &h, sizeof h);
}

INL float bias_at(const void* bias, DType dtype, ptrdiff_t i) {
  if (bias == nullptr) return 0.0f;
  return dtype == kFloat32 ? ((const float*)bias)[i] : widen(((const uint16_t*)bias)[i]);
}

// Of vectors a and b made of blocks of B lanes: the blocks' first (or second) halves, those of a before those of b.
template <int B, int Second, int... I>
INL vf halves(vf a, vf b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I / (B / 2) * B + I % (B / 2) + Second * (B / 2))...);
}
template <int B>
INL vf fold(vf a, vf b) {
  constexpr auto all = std::make_integer_sequence<int, W>{};
  return halves<B, 0>(a, b, all) + halves<B, 1>(a, b, all);
}

// The sums of W vectors, as one vector: a tree of folds, two shuffles for each addition and W - 1 additions in all. The
// order is fixed, so results are bit-equal.
template <int B>
INL void fold_all(vf (&v)[W]) {
  if constexpr (B > 1) {
#pragma GCC unroll 8
    for (int i = 0; i < B / 2; ++i) v[i] = fold<B>(v[2 * i], v[2 * i + 1]);
    fold_all<B / 2>(v);
  }
}
INL vf sums(vf (&v)[W]) {
  fold_all<W>(v);
  return v[0];
}

template <int... I>
INL vf interleave_low(vf a, vf b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I / 2 + (I % 2) * W)...);
}
template <int... I>
INL vf interleave_high(vf a, vf b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (W / 2 + I / 2 + (I % 2) * W)...);
}

// In place: element j of row i becomes element i of row j. log2 W rounds of perfect shuffles.
INL void transpose(vf (&rows)[W]) {
  constexpr auto all = std::make_integer_sequence<int, W>{};
#pragma GCC unroll 4
  for (int round = 1; round < W; round *= 2) {
    vf next[W];
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; ++i) {
      next[2 * i] = interleave_low(rows[i], rows[i + W / 2], all);
      next[2 * i + 1] = interleave_high(rows[i], rows[i + W / 2], all);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) rows[i] = next[i];
  }
}
