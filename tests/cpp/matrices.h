// Matrices, inputs and outputs for the drivers: random numbers in buffers of exact size.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>

#include "buffer.h"
#include "core.h"
#include "fit.h"
#include "packed.h"

using fanfold::DType;

inline std::mt19937& random_bits() {
  static std::mt19937 generator(1);
  return generator;
}
inline float random_float() { return std::uniform_real_distribution<float>(-1.0f, 1.0f)(random_bits()); }
// A float16 of 2^-9 … 2^-5.
inline uint16_t random_half() {
  return static_cast<uint16_t>((6 + random_bits()() % 4) << 10 | random_bits()() % 1024);
}

inline size_t size_of(DType t) { return t == fanfold::kFloat32 ? 4 : 2; }

inline void put_number(uint8_t* to, DType t, float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  const uint16_t upper = static_cast<uint16_t>(bits >> 16);
  if (t == fanfold::kFloat32) memcpy(to, &bits, 4);
  if (t == fanfold::kBFloat16) memcpy(to, &upper, 2);
}
inline float number_at(const uint8_t* from, DType t) {
  uint32_t bits = 0;
  if (t == fanfold::kFloat32) memcpy(&bits, from, 4);
  if (t == fanfold::kBFloat16) memcpy(reinterpret_cast<uint8_t*>(&bits) + 2, from, 2);
  float v;
  memcpy(&v, &bits, 4);
  return v;
}

// Of [rows][stride] numbers, of the last row only `width`.
inline size_t bytes(ptrdiff_t rows, ptrdiff_t width, ptrdiff_t stride, DType t) {
  return static_cast<size_t>((rows - 1) * stride + width) * size_of(t);
}
inline Buffer numbers(ptrdiff_t rows, ptrdiff_t width, ptrdiff_t stride, DType t) {
  Buffer b(bytes(rows, width, stride, t), size_of(t));
  for (size_t i = 0; i < b.size(); i += size_of(t)) put_number(b.data() + i, t, random_float());
  return b;
}

// One packed matrix of random codes; what pads a header is NaN, because nothing may read it.
struct PackedData {
  fanfold::Packed matrix;
  Buffer data, bias;
};

inline void fill_column(const fanfold::Packed& m, uint8_t* to, uint8_t* end) {
  if (m.format == fanfold::kFp32 || m.format == fanfold::kBf16) {
    const DType t = m.format == fanfold::kFp32 ? fanfold::kFloat32 : fanfold::kBFloat16;
    for (; to < end; to += size_of(t)) put_number(to, t, random_float());
    return;
  }
  if (m.format == fanfold::kFp16) {
    for (; to < end; to += 2) {
      const uint16_t h = random_half();
      memcpy(to, &h, 2);
    }
    return;
  }
  for (ptrdiff_t k = 0; k < m.k; k += m.block) {
    const ptrdiff_t inputs = m.k - k < m.block ? m.k - k : m.block, header = fanfold::header_bytes(m, inputs);
    const ptrdiff_t used = m.group == 0 ? 0 : (inputs + m.group - 1) / m.group * (m.minimum ? 4 : 2) * fanfold::kLanes;
    for (ptrdiff_t i = 0; i < header; i += 2) {
      const uint16_t h = i < used ? random_half() : 0x7fff;
      memcpy(to + i, &h, 2);
    }
    uint8_t* const next = inputs == m.block ? to + m.block_bytes : end;
    for (to += header; to < next; ++to) *to = static_cast<uint8_t>(random_bits()());
  }
}

inline PackedData packed_data(int format, ptrdiff_t n, ptrdiff_t k, bool int8_activations, bool bias,
                              size_t missing = 0) {
  PackedData p;
  if (bias) p.bias = numbers(1, n, n, fanfold::kFloat32);
  const fanfold::Packed shape = fanfold::packed_matrix(nullptr, format, n, k, nullptr, int8_activations);
  const size_t columns = static_cast<size_t>((n + fanfold::kLanes - 1) / fanfold::kLanes);
  const size_t scales = format == fanfold::kInt8 ? columns * fanfold::kLanes * sizeof(float) : 0;
  const size_t column = static_cast<size_t>(shape.column_bytes);
  Buffer all(scales + columns * column);
  for (size_t i = 0; i < scales; i += 4) put_number(all.data() + i, fanfold::kFloat32, 0.01f * random_float());
  for (size_t c = 0; c < columns; ++c) {
    uint8_t* const at = all.data() + scales + c * column;
    fill_column(shape, at, at + column);
  }
  p.data = Buffer(all.size() - missing);
  memcpy(p.data.data(), all.data(), p.data.size());
  p.matrix = fanfold::packed_matrix(p.data.data(), format, n, k, p.bias.as<float>(), int8_activations);
  return p;
}

// y of a call: NaN everywhere at first, so that what is not written shows, and so does what lies between the rows.
struct Output {
  Output(ptrdiff_t tokens, ptrdiff_t n, ptrdiff_t stride, DType t)
      : n(n), stride(stride), type(t), buffer(bytes(tokens, n, stride, t), size_of(t)) {
    buffer.fill(0xff);
  }
  // Whether all of y was written with numbers and nothing else was touched; `busy`: not all of them are 0.
  bool complete(bool busy) const {
    bool any = !busy;
    for (ptrdiff_t i = 0; i < static_cast<ptrdiff_t>(buffer.size() / size_of(type)); ++i) {
      const float v = number_at(buffer.data() + static_cast<size_t>(i) * size_of(type), type);
      if (std::isfinite(v) != (i % stride < n)) return false;
      any |= v != 0.0f;
    }
    return any;
  }
  bool same(const Output& other) const { return memcmp(buffer.data(), other.buffer.data(), buffer.size()) == 0; }

  ptrdiff_t n, stride;
  DType type;
  Buffer buffer;
};
