// Every kernel on 2 and 4 threads, and two callers at once on the same weights, under ThreadSanitizer.
//   drive_races ISA     a name, or "list" for the names
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "calls.h"

namespace {

using fanfold::DType;

// Some tasks for each of 4 threads; 300 tokens are two or three blocks, 5 and 60 the matrix unit's.
constexpr Shape kShape = {70, 390};
constexpr ptrdiff_t kCounts[] = {1, 5, 60, 300};

int cases = 0;

template <class AnyKernels, class AnyCall>
void on_threads(const AnyKernels& kernels, AnyCall call, DType type) {
  for (const ptrdiff_t count : kCounts) {
    const Buffer x = numbers(count, inputs(call), inputs(call), type);
    set_activation(&call, fanfold::kSilu, false);
    set_tokens(&call, x, type, count, 0);
    const Output one = output_of(kernels, call, 1, 0xff);
    for (const int threads : {2, 4}) {
      if (!output_of(kernels, call, threads, 0xff).same(one)) wrong("y depends on the number of threads");
    }
    ++cases;
  }
}

// Two calls at once through `run`, as two Python threads make them: one set of weights, workspaces from the cache.
template <class AnyKernels, class AnyCall>
void two_callers(const AnyKernels& kernels, AnyCall call, DType type) {
  set_activation(&call, fanfold::kSilu, false);
  call.threads = 2;
  const auto caller = [&](ptrdiff_t first) {
    for (int i = 0; i < 4; ++i) {
      const ptrdiff_t count = first + 9 * i;
      Buffer x(bytes(count, inputs(call), inputs(call), type));
      x.fill(0x3f);  // `numbers` has one generator
      AnyCall own = call;
      set_tokens(&own, x, type, count, 0);
      const Output y(count, outputs(call), outputs(call), type);
      own.y = y.buffer.data();
      fanfold::run(kernels, own);
      if (!y.complete(false)) wrong("y is not written, or more than y");
    }
  };
  std::thread other(caller, 3);
  caller(20);
  other.join();
  ++cases;
}

void packed(const fanfold::Isa& isa, Mode m, DType type) {
  snprintf(current_case, sizeof current_case, "packed %s format %d int8 activations %d x %d", isa.name, m.format,
           m.int8_activations, type);
  const PackedLayer l = packed_layer(cases % 2 == 0 ? kGatedFfn : kPlainFfn, m, kShape, true);
  on_threads(*isa.packed, l.call, type);
  two_callers(*isa.packed, l.call, type);
  // further products of one x beside the first
  PackedLayer first = packed_layer(kLinear, m, kShape, true);
  const PackedLayer more = packed_layer(kLinear, m, {kShape.d_model, 150}, true);
  const Output y(kCounts[3], 150, 150, type);
  first.call.beside[first.call.n_beside++] = {more.call.down, y.buffer.data(), 150};
  on_threads(*isa.packed, first.call, type);
}

void plain(const fanfold::Isa& isa, DType w, DType type, bool transposed) {
  snprintf(current_case, sizeof current_case, "in place %s weights %d x %d transposed %d", isa.name, w, type,
           transposed);
  for (const Kind kind : {kGatedFfn, kLinear}) {
    const PlainLayer l = plain_layer(kind, w, transposed, kShape, 1, true);
    on_threads(*isa.kernels, l.call, type);
    two_callers(*isa.kernels, l.call, type);
  }
}

// An activation that is not finite: all threads say so, and the call is run again.
void not_finite(const fanfold::Isa& isa) {
  snprintf(current_case, sizeof current_case, "not finite %s", isa.name);
  PackedLayer l = packed_layer(kGatedFfn, {fanfold::kInt8G32, true}, kShape, false);
  const Buffer x = numbers(40, kShape.d_model, kShape.d_model, fanfold::kFloat32);
  for (size_t i = 0; i < x.size(); i += 4 * 100) put_number(x.data() + i, fanfold::kFloat32, INFINITY);
  set_activation(&l.call, fanfold::kSilu, false);
  set_tokens(&l.call, x, fanfold::kFloat32, 40, 0);
  output_of(*isa.packed, l.call, 4, 0xff);
}

// The middle of an FFN in training, results written over what they are made of.
void middle(const fanfold::Isa& isa) {
  snprintf(current_case, sizeof current_case, "middle %s", isa.name);
  for (const ptrdiff_t count : kCounts) {
    Buffer parts[3];
    fanfold::Middle c;
    for (int i = 0; i < 3; ++i) parts[i] = numbers(count, kShape.d_ff, kShape.d_ff, fanfold::kFloat32);
    c.gate = c.to_gate = {parts[0].data(), kShape.d_ff};
    c.up = c.m = {parts[1].data(), kShape.d_ff};
    c.grad = c.to_up = {parts[2].data(), kShape.d_ff};
    c.threads = 4;
    c.tokens = count;
    c.d_ff = kShape.d_ff;
    c.act = fanfold::kGeluErf;
    c.gate_limit = c.up_limit = INFINITY;
    isa.kernels->middle(c);
    ++cases;
  }
}

void norm(const fanfold::Isa& isa) {
  snprintf(current_case, sizeof current_case, "norm %s", isa.name);
  const Buffer x = numbers(40, 33, 33, fanfold::kBFloat16), weight = numbers(1, 33, 33, fanfold::kBFloat16);
  fanfold::Norm c;
  c.threads = 4;
  c.x = c.y = x.data();
  c.x_stride = c.y_stride = c.width = 33;
  c.tokens = 40;
  c.dtype = fanfold::kBFloat16;
  c.weight = weight.data();
  isa.kernels->norm(c);
  ++cases;
}

// Codes of the same row come from one thread, but bytes of neighbouring rows lie side by side.
void fits(const fanfold::Isa& isa) {
  snprintf(current_case, sizeof current_case, "fit %s", isa.name);
  for (const bool minimum : {false, true}) fit_case(70, 45, 32, minimum, 1).run(*isa.fit, 4);
  cases += 2;
}

void drive(const fanfold::Isa& isa) {
  constexpr DType kTypes[] = {fanfold::kFloat32, fanfold::kBFloat16};
  for (int i = 0; i < kModes; ++i) {
    for (const DType type : kTypes) packed(isa, mode(i), type);
  }
  for (const DType w : kTypes) {
    for (const bool transposed : {false, true}) plain(isa, w, w, transposed);
  }
  not_finite(isa);
  middle(isa);
  norm(isa);
  fits(isa);
  printf("%s: %d cases\n", isa.name, cases);
}

}  // namespace

int main(int argc, char** argv) {
  name_cases();
  const std::string name = argc > 1 ? argv[1] : "";
  for (int i = 0; i < fanfold::isa_count(); ++i) {
    const fanfold::Isa* const isa = fanfold::isa(i);
    if (isa == nullptr) continue;
    if (name == "list") puts(isa->name);
    if (name != isa->name) continue;
    drive(*isa);
    return 0;
  }
  if (name == "list") return 0;
  fprintf(stderr, "no instruction set %s here; see: drive_races list\n", name.c_str());
  return 2;
}
