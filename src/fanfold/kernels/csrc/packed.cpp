// What follows from a format, and one call.
#include "packed.h"

#include <ctime>
#include <vector>

#include "parallel.h"
#include "workspace.h"

namespace fanfold {

namespace {

struct Layout {
  int bits;
  ptrdiff_t group;
  bool minimum;
  int offset;
};

// Codes of 8 bits are stored as code + 128, which the CPUs' u8 x s8 products want.
constexpr Layout kLayouts[kFormatCount] = {
    {32, 0, false, 0},   {16, 0, false, 0},    {16, 0, false, 0}, {8, 0, false, 128}, {8, 32, false, 128},
    {8, 64, false, 128}, {8, 128, false, 128}, {4, 32, true, 0},  {4, 64, true, 0},   {4, 128, true, 0},
    {8, 32, false, 128}, {4, 32, false, 8},    {4, 32, true, 0}};

constexpr ptrdiff_t kRowGroup = 256;  // activations that share a scale where the weights have one a row

ptrdiff_t up_to(ptrdiff_t n, ptrdiff_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

Packed packed_matrix(const void* data, int format, ptrdiff_t n, ptrdiff_t k, const float* bias, bool int8_activations) {
  Packed m;
  const Layout& layout = kLayouts[format];
  m.columns = static_cast<const uint8_t*>(data);
  m.bias = bias;
  m.format = static_cast<Format>(format);
  m.n = n;
  m.k = k;
  m.bits = layout.bits;
  m.group = layout.group;
  m.minimum = layout.minimum;
  m.offset = layout.offset;
  m.int8_activations = int8_activations && m.is_integer();
  m.activation_group = m.group != 0 ? m.group : kRowGroup;
  const ptrdiff_t unit = m.bits == 4 ? 8 : m.bits == 8 ? 4 : m.format == kBf16 ? 2 : 1;
  const ptrdiff_t line = kLanes * m.bits / 8;  // bytes of one input of a column
  if (m.group == 0) {
    m.block = kRowGroup;
    m.column_bytes = up_to(k, unit) * line;
  } else {
    m.block = m.minimum ? (m.group > 64 ? m.group : 64) : 2 * m.group;
    const ptrdiff_t rest = k % m.block;
    m.column_bytes = k / m.block * (header_bytes(m, m.block) + m.block * line);
    if (rest != 0) m.column_bytes += header_bytes(m, rest) + up_to(rest, unit) * line;
  }
  m.block_bytes = header_bytes(m, m.block) + m.block * line;
  if (m.format == kInt8 && data != nullptr) {
    m.row_scale = static_cast<const float*>(data);
    m.columns += up_to(n, kLanes) * static_cast<ptrdiff_t>(sizeof(float));
  }
  return m;
}

bool fit_together(const Packed& a, const Packed& b) {
  return a.format == b.format && a.k == b.k && a.int8_activations == b.int8_activations;
}

void run(const PackedKernels& isa, const PackedCall& given) {
  if (given.tokens <= 0) return;
  PackedCall call = given;
  ptrdiff_t weights = call.gate.n * call.gate.k + call.up.n * call.up.k + call.down.n * call.down.k;
  for (int i = 0; i < call.n_beside; ++i) weights += call.beside[i].matrix.n * call.beside[i].matrix.k;
  call.threads = threads_worth(call.threads, static_cast<double>(weights), call.tokens);
  {
    const Lease lease(isa.workspace(call));
    if (isa.run(call, reinterpret_cast<uint8_t*>(lease.data()))) return;
  }
  call.gate.int8_activations = call.up.int8_activations = call.down.int8_activations = false;
  for (int i = 0; i < call.n_beside; ++i) call.beside[i].matrix.int8_activations = false;
  const Lease lease(isa.workspace(call));
  isa.run(call, reinterpret_cast<uint8_t*>(lease.data()));
}

namespace {

struct Burn {
  const PackedKernels* isa;
  Arithmetic kind;
  ptrdiff_t rounds;
  std::vector<double> operations, seconds;  // of each thread
};

// On a processor, so that waiting for one does not count.
double seconds_of_this_thread() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void burn(int thread, int, void* arg) {
  Burn& b = *static_cast<Burn*>(arg);
  const double begin = seconds_of_this_thread();
  b.operations[thread] = b.isa->burn(b.kind, b.rounds);
  b.seconds[thread] = seconds_of_this_thread() - begin;
}

}  // namespace

double peak(const PackedKernels& isa, Arithmetic kind, int threads) {
  constexpr int kTrials = 3;
  const size_t n = static_cast<size_t>(threads);
  Burn b = {&isa, kind, 1000, std::vector<double>(n), std::vector<double>(n)};
  double best = 0.0;
  for (int trials = 0; trials < kTrials;) {
    parallel(threads, burn, &b);
    if (b.operations[0] == 0.0) return 0.0;
    if (b.seconds[0] < 0.005) {
      b.rounds *= 4;
      continue;
    }
    double rate = 0.0;
    for (size_t i = 0; i < n; ++i) {
      if (b.seconds[i] > 0.0) rate += b.operations[i] / b.seconds[i];
    }
    if (rate > best) best = rate;
    ++trials;
  }
  return best;
}

}  // namespace fanfold
