// What Python sees. Pointers come as integers; 0 means absent. The GIL is released while computing.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cmath>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bound.h"
#include "core.h"
#include "fit.h"
#include "graph_op.h"
#include "packed.h"
#include "quick.h"

namespace nb = nanobind;
using fanfold::Call;
using fanfold::DType;
using Params = std::tuple<double, double, double, double>;

namespace {

const fanfold::Isa& checked(int isa) {
  const fanfold::Isa* found = fanfold::isa(isa);
  if (found == nullptr) throw nb::value_error("this CPU or build has no such instruction set: see isas()");
  return *found;
}

DType dtype(int code) {
  if (code != fanfold::kFloat32 && code != fanfold::kBFloat16) {
    throw nb::value_error("dtype code: expected 0 (float32) or 1 (bfloat16)");
  }
  return static_cast<DType>(code);
}

int act_id(int act) {
  if (act < 0 || act >= fanfold::kActCount) throw nb::value_error("activation id out of range: see activation_names()");
  return act;
}

void set_params(double (&to)[4], const Params& p) { std::tie(to[0], to[1], to[2], to[3]) = p; }

std::map<std::string, int> isas() {
  std::map<std::string, int> numbers;
  for (int i = 0; i < fanfold::isa_count(); ++i) {
    if (const fanfold::Isa* found = fanfold::isa(i)) numbers[found->name] = i;
  }
  return numbers;
}

std::vector<std::string> activation_names() {
  return {fanfold::activation_names(), fanfold::activation_names() + fanfold::kActCount};
}

Bound bind_ffn(int isa, int x_dtype, int y_dtype, ptrdiff_t d_model, ptrdiff_t d_ff, uintptr_t gate,
               ptrdiff_t gate_stride, uintptr_t gate_bias, uintptr_t up, ptrdiff_t up_stride, uintptr_t up_bias,
               uintptr_t down, ptrdiff_t down_stride, uintptr_t down_bias, int w_dtype, bool up_transposed,
               bool down_transposed, int act, const Params& params, float gate_limit, float up_limit, float up_offset) {
  Bound bound{checked(isa).kernels, {}};
  Call& c = bound.call;
  c.x_dtype = dtype(x_dtype);
  c.y_dtype = dtype(y_dtype);
  c.d_model = c.d_out = d_model;
  c.d_ff = d_ff;
  c.gate = {pointer(gate), gate_stride, up_transposed, pointer(gate_bias)};
  c.up = {pointer(up), up_stride, up_transposed, pointer(up_bias)};
  c.down = {pointer(down), down_stride, down_transposed, pointer(down_bias)};
  c.w_dtype = dtype(w_dtype);
  c.act = act_id(act);
  set_params(c.params, params);
  c.gate_limit = gate_limit;
  c.up_limit = up_limit;
  c.up_offset = up_offset;
  return bound;
}

Bound bind_linear(int isa, int x_dtype, int y_dtype, ptrdiff_t n_in, ptrdiff_t n_out, uintptr_t w, ptrdiff_t w_stride,
                  int w_dtype, bool transposed, uintptr_t bias) {
  Bound bound{checked(isa).kernels, {}};
  Call& c = bound.call;
  c.x_dtype = dtype(x_dtype);
  c.y_dtype = dtype(y_dtype);
  c.d_ff = n_in;
  c.d_out = n_out;
  c.down = {pointer(w), w_stride, transposed, pointer(bias)};
  c.w_dtype = dtype(w_dtype);
  return bound;
}

BoundNorm bind_norm(int isa, int dtype_code, ptrdiff_t width, uintptr_t weight, float offset, double eps) {
  BoundNorm bound{checked(isa).kernels, {}};
  bound.call.dtype = dtype(dtype_code);
  bound.call.width = width;
  bound.call.weight = pointer(weight);
  bound.call.offset = offset;
  bound.call.eps = eps;
  return bound;
}

// (data, format, n, k, bias, whether inputs are quantized); data 0: absent
using Part = std::tuple<uintptr_t, int, ptrdiff_t, ptrdiff_t, uintptr_t, bool>;

fanfold::Packed packed(const Part& part) {
  const auto& [data, format, n, k, bias, int8] = part;
  if (data == 0) return {};
  if (format < 0 || format >= fanfold::kFormatCount) throw nb::value_error("format id out of range");
  if (n < 1 || k < 1) throw nb::value_error("a packed matrix has no rows or no columns");
  return fanfold::packed_matrix(pointer(data), format, n, k, pointer<const float>(bias), int8);
}

BoundPacked bind_packed(int isa, int x_dtype, const Part& gate, const Part& up, const Part& down, int act,
                        const Params& params, float gate_limit, float up_limit, float up_offset) {
  BoundPacked bound{checked(isa).packed, {}};
  fanfold::PackedCall& c = bound.call;
  c.x_dtype = c.y_dtype = dtype(x_dtype);
  c.gate = packed(gate);
  c.up = packed(up);
  c.down = packed(down);
  c.act = act_id(act);
  set_params(c.params, params);
  c.gate_limit = gate_limit;
  c.up_limit = up_limit;
  c.up_offset = up_offset;
  return bound;
}

BoundPacked bind_packed_linear(int isa, int x_dtype, const Part& matrix) {
  BoundPacked bound{checked(isa).packed, {}};
  bound.call.x_dtype = bound.call.y_dtype = dtype(x_dtype);
  bound.call.down = packed(matrix);
  return bound;
}

// In which arithmetic a matrix multiplies `tokens` tokens: "fp32", "bf16" or "int8".
std::string products(int isa, int x_dtype, const Part& matrix, ptrdiff_t tokens) {
  static const char* const names[] = {"fp32", "bf16", "int8"};
  const fanfold::Arithmetic kind =
      checked(isa).packed->products(packed(matrix), dtype(x_dtype) == fanfold::kBFloat16, tokens);
  return names[kind];
}

// Whether one call may compute the products of both: what `attempt` does of its own accord with "besides".
bool fit_together(const BoundPacked& a, const BoundPacked& b) {
  return a.kernels == b.kernels && a.call.x_dtype == b.call.x_dtype && a.call.up.columns == nullptr &&
         b.call.up.columns == nullptr && fanfold::fit_together(a.call.down, b.call.down);
}

double peak(const std::string& kind, int threads) {
  const std::map<std::string, fanfold::Arithmetic> kinds = {
      {"fp32", fanfold::kFloatArithmetic}, {"bf16", fanfold::kBf16Arithmetic}, {"int8", fanfold::kInt8Arithmetic}};
  const auto found = kinds.find(kind);
  if (found == kinds.end()) throw nb::value_error("arithmetic: expected fp32, bf16 or int8");
  double best = 0.0;
  const nb::gil_scoped_release release;
  for (int i = 0; i < fanfold::isa_count(); ++i) {
    const fanfold::Isa* isa = fanfold::isa(i);
    const double rate = isa == nullptr ? 0.0 : fanfold::peak(*isa->packed, found->second, threads < 1 ? 1 : threads);
    best = rate > best ? rate : best;
  }
  return best;
}

// Asks the system for large pages under a long-lived buffer: a stream of weights touches a page every 4 KiB otherwise.
void use_large_pages(uintptr_t address, size_t bytes) {
#ifdef __linux__
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage, end = (address + bytes) / kPage * kPage;
  if (end > begin)
    madvise(pointer<void>(begin), end - begin, MADV_HUGEPAGE);  // a wish: whether it is granted is no matter
#else
  (void)address;
  (void)bytes;
#endif
}

void activation(int isa, uintptr_t src, uintptr_t dst, ptrdiff_t n, int act, const Params& params) {
  double values[4];
  set_params(values, params);
  checked(isa).kernels->activation(act_id(act), values, pointer<const float>(src), pointer<float>(dst), n);
}

void fit(int isa, int threads, uintptr_t w, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t k, ptrdiff_t group,
         uintptr_t weight, float low, float high, int offset, bool is_signed, bool half, float plain,
         const std::vector<float>& steps, int again, uintptr_t codes, uintptr_t scale, uintptr_t minimum) {
  fanfold::Fit c;
  c.threads = threads;
  c.w = pointer<const float>(w);
  c.stride = stride;
  c.n = n;
  c.k = k;
  c.group = group;
  c.weight = pointer<const float>(weight);
  c.low = low;
  c.high = high;
  c.offset = offset;
  c.is_signed = is_signed;
  c.half = half;
  c.plain = plain;
  c.steps = steps.data();
  c.n_steps = static_cast<ptrdiff_t>(steps.size());
  c.again = again;
  c.codes = pointer<uint8_t>(codes);
  c.scale = pointer<void>(scale);
  c.minimum = pointer<void>(minimum);
  const fanfold::FitKernels& kernels = *checked(isa).fit;
  const nb::gil_scoped_release release;
  fanfold::fit(kernels, c);
}

using RowsAt = std::tuple<uintptr_t, ptrdiff_t>;  // address and stride; address 0: absent

fanfold::Rows rows(const RowsAt& at) { return {pointer<void>(std::get<0>(at)), std::get<1>(at)}; }

void middle(int isa, int threads, int dtype_code, ptrdiff_t tokens, ptrdiff_t d_ff, const RowsAt& gate,
            const RowsAt& up, const RowsAt& grad, const RowsAt& to_gate, const RowsAt& to_up, const RowsAt& m,
            const RowsAt& mask, float kept_scale, int act, const Params& params, float gate_limit, float up_limit,
            float up_offset) {
  fanfold::Middle c;
  c.threads = threads < 1 ? 1 : threads;
  c.dtype = dtype(dtype_code);
  c.tokens = tokens;
  c.d_ff = d_ff;
  c.gate = rows(gate);
  c.up = rows(up);
  c.grad = rows(grad);
  c.to_gate = rows(to_gate);
  c.to_up = rows(to_up);
  c.m = rows(m);
  c.mask = pointer<const uint8_t>(std::get<0>(mask));
  c.mask_stride = std::get<1>(mask);
  c.kept_scale = kept_scale;
  c.act = act_id(act);
  set_params(c.params, params);
  c.gate_limit = gate_limit;
  c.up_limit = up_limit;
  c.up_offset = up_offset;
  const fanfold::Kernels& kernels = *checked(isa).kernels;
  const nb::gil_scoped_release release;
  kernels.middle(c);
}

}  // namespace

NB_MODULE(_cpu, m) {
  // A bound call that lives until Python ends is no leak worth a page of lines.
  nb::set_leak_warnings(false);
  m.def("isas", &isas, "{name: number} of the instruction sets of this build that this CPU has; higher is better.");
  m.def("activation_names", &activation_names, "Names of the activations, by id.");
  nb::class_<Bound>(m, "Bound").def("run", &Bound::run);
  m.def("bind_ffn", &bind_ffn);
  m.def("bind_linear", &bind_linear);
  nb::class_<BoundNorm>(m, "BoundNorm").def("run", &BoundNorm::run);
  m.def("bind_norm", &bind_norm);
  nb::class_<BoundPacked>(m, "BoundPacked").def("run", &BoundPacked::run);
  m.def("bind_packed", &bind_packed);
  m.def("bind_packed_linear", &bind_packed_linear);
  m.def("products", &products);
  m.def("fit_together", &fit_together);
  m.attr("MOST_BESIDE") = fanfold::PackedCall::kMostBeside;
  m.def("attempt", &attempt);
  m.def("repeat", &repeat);
  m.def("graph_op_needs", &graph_op_needs);
  m.def("register_graph_op", &register_graph_op);
  m.def("remember_graph_op", &remember_graph_op);
  m.def("forget_graph_op", &forget_graph_op);
  m.def("graph_op_calls", &graph_op_calls);
  m.def("watch_matrix", &watch_matrix);
  m.def("unwatch_matrix", &unwatch_matrix);
  m.def("is_written", &is_written);
  m.def("activation", &activation);
  m.def("middle", &middle);
  m.def("fit", &fit);
  m.def("use_large_pages", &use_large_pages);
  m.def("peak", &peak, "Operations per second that this CPU reaches with an arithmetic; 0 without a unit for it.");
}
