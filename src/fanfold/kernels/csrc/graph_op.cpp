// A call of an operator that is written in Python costs 28 us beside its product in a decoding model, often longer than
// that: its arguments become Python objects, each of which is fetched from memory. In C it is 12 (docs/measured.md).
//
// PyTorch's stable C interface (torch/csrc/stable, from 2.10 on) has no header here: it is found when the operator is
// registered, so that one build serves every version. What of it is used: an argument is 64 bits that the callee owns;
// a tensor a handle, a list of tensors a handle whose items are handles of their own, a string a handle.
#include "graph_op.h"

#include <nanobind/stl/string.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "bound.h"

namespace nb = nanobind;

namespace {

using Handle = void*;
using Value = uint64_t;
using Status = int32_t;  // 0: done
using Boxed = void (*)(Value* stack, uint64_t inputs, uint64_t outputs);

constexpr uint64_t kInterface = (uint64_t{2} << 56) | (uint64_t{10} << 48);  // of PyTorch 2.10

struct Torch {
  Status (*aoti_torch_library_init_impl)(const char*, const char*, const char*, uint32_t, Handle*);
  Status (*torch_library_impl)(Handle, const char*, Boxed, uint64_t);
  Status (*aoti_torch_get_data_ptr)(Handle, void**);
  Status (*aoti_torch_get_numel)(Handle, int64_t*);
  Status (*aoti_torch_get_dtype)(Handle, int32_t*);
  Status (*aoti_torch_is_contiguous)(Handle, bool*);
  Status (*aoti_torch_get_dim)(Handle, int64_t*);
  Status (*aoti_torch_get_sizes)(Handle, int64_t**);
  Status (*aoti_torch_empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*);
  Status (*aoti_torch_delete_tensor_object)(Handle);
  Status (*torch_list_size)(Handle, size_t*);
  Status (*torch_list_get_item)(Handle, size_t, Value*);
  Status (*torch_delete_list)(Handle);
  Status (*torch_string_length)(Handle, size_t*);
  Status (*torch_string_c_str)(Handle, const char**);
  Status (*torch_delete_string)(Handle);
  Status (*torch_get_num_threads)(uint32_t*);
  int32_t (*aoti_torch_dtype_float32)();
  int32_t (*aoti_torch_dtype_bfloat16)();
  int32_t (*aoti_torch_dtype_uint8)();
  int32_t (*aoti_torch_device_type_cpu)();
};

Torch torch;
PyObject* otherwise = nullptr;

template <class Visit>
void each_function(Visit visit) {
#define FANFOLD_VISIT(name) visit(#name, torch.name)
  FANFOLD_VISIT(aoti_torch_library_init_impl);
  FANFOLD_VISIT(torch_library_impl);
  FANFOLD_VISIT(aoti_torch_get_data_ptr);
  FANFOLD_VISIT(aoti_torch_get_numel);
  FANFOLD_VISIT(aoti_torch_get_dtype);
  FANFOLD_VISIT(aoti_torch_is_contiguous);
  FANFOLD_VISIT(aoti_torch_get_dim);
  FANFOLD_VISIT(aoti_torch_get_sizes);
  FANFOLD_VISIT(aoti_torch_empty_strided);
  FANFOLD_VISIT(aoti_torch_delete_tensor_object);
  FANFOLD_VISIT(torch_list_size);
  FANFOLD_VISIT(torch_list_get_item);
  FANFOLD_VISIT(torch_delete_list);
  FANFOLD_VISIT(torch_string_length);
  FANFOLD_VISIT(torch_string_c_str);
  FANFOLD_VISIT(torch_delete_string);
  FANFOLD_VISIT(torch_get_num_threads);
  FANFOLD_VISIT(aoti_torch_dtype_float32);
  FANFOLD_VISIT(aoti_torch_dtype_bfloat16);
  FANFOLD_VISIT(aoti_torch_dtype_uint8);
  FANFOLD_VISIT(aoti_torch_device_type_cpu);
#undef FANFOLD_VISIT
}

void done(Status status) {
  if (status != 0) throw std::runtime_error("fanfold::packed_run: PyTorch's C interface refused a call");
}

template <class T>
T ask(Status (*function)(Handle, T*), Handle of) {
  T found{};
  done(function(of, &found));
  return found;
}

struct DeleteTensor {
  void operator()(void* handle) const { torch.aoti_torch_delete_tensor_object(handle); }
};
struct DeleteList {
  void operator()(void* handle) const { torch.torch_delete_list(handle); }
};
struct DeleteString {
  void operator()(void* handle) const { torch.torch_delete_string(handle); }
};
using Tensor = std::unique_ptr<void, DeleteTensor>;

Handle handle(Value value) { return reinterpret_cast<Handle>(static_cast<uintptr_t>(value)); }

uintptr_t address(const Tensor& t) { return reinterpret_cast<uintptr_t>(ask(torch.aoti_torch_get_data_ptr, t.get())); }

// 8 bytes that must be what they were: somebody may write to what stands in for a matrix in its module.
struct Place {
  uintptr_t at;
  int64_t word;

  bool written() const {
    int64_t now;
    std::memcpy(&now, pointer<const void>(at), sizeof now);
    return now != word;
  }
};

// A call that was made before: a function of where its matrices and biases lie, which is compared each time.
struct Known {
  std::string description;
  fanfold::DType x_dtype;
  int64_t inputs;
  const fanfold::PackedKernels* kernels;
  std::vector<fanfold::PackedCall> calls;
  std::vector<int64_t> outputs;
  bool together;
  size_t matrices;
  std::vector<std::tuple<uintptr_t, int64_t>> parts;
  std::vector<Place> places;
};

constexpr int kMostBeside = fanfold::PackedCall::kMostBeside;
constexpr size_t kMostKnown = 4096;

std::mutex mutex;                                                        // of `known` and `watched`
std::unordered_multimap<uintptr_t, std::shared_ptr<const Known>> known;  // by the address of the first matrix
std::unordered_map<uintptr_t, Place> watched;                            // by the address of a matrix
std::atomic<uint64_t> calls{0};

std::shared_ptr<const Known> find(uintptr_t first, const char* text, size_t length, fanfold::DType x_dtype) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [begin, end] = known.equal_range(first);
  for (auto i = begin; i != end; ++i) {
    const Known& k = *i->second;
    if (k.x_dtype == x_dtype && k.description.size() == length && std::memcmp(k.description.data(), text, length) == 0)
      return i->second;
  }
  return nullptr;
}

// Whether a part is what a kernel was bound to: bytes, or for a bias floats.
bool as_known(const Tensor& part, const std::tuple<uintptr_t, int64_t>& place, int32_t dtype) {
  return address(part) == std::get<0>(place) && ask(torch.aoti_torch_get_numel, part.get()) == std::get<1>(place) &&
         ask(torch.aoti_torch_get_dtype, part.get()) == dtype && ask(torch.aoti_torch_is_contiguous, part.get());
}

// y, or nothing if this call was not made before.
Tensor repeated(const Tensor& x, const std::vector<Tensor>& parts, const char* text, size_t length) {
  if (parts.empty() || std::getenv("FANFOLD_ISA") != nullptr) return {};  // may be another one than when it was bound
  const int32_t code = ask(torch.aoti_torch_get_dtype, x.get());
  const bool wide = code == torch.aoti_torch_dtype_float32();
  if (!wide && code != torch.aoti_torch_dtype_bfloat16()) return {};
  const auto k = find(address(parts[0]), text, length, wide ? fanfold::kFloat32 : fanfold::kBFloat16);
  const int64_t dim = ask(torch.aoti_torch_get_dim, x.get());
  if (k == nullptr || dim < 1 || parts.size() != k->parts.size()) return {};
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool is_matrix = i < k->matrices;
    const int32_t dtype = is_matrix ? torch.aoti_torch_dtype_uint8() : torch.aoti_torch_dtype_float32();
    if (!as_known(parts[i], k->parts[i], dtype)) return {};
  }
  for (const Place& place : k->places) {
    if (place.written()) return {};
  }
  const int64_t* const shape = ask(torch.aoti_torch_get_sizes, x.get());
  // A negative view (of a conjugate) does not come here: PyTorch gives an operator without a kernel for it a copy.
  if (shape[dim - 1] != k->inputs || !ask(torch.aoti_torch_is_contiguous, x.get())) return {};
  const int64_t tokens = ask(torch.aoti_torch_get_numel, x.get()) / k->inputs;

  int64_t width = 0;
  for (const int64_t n : k->outputs) width += n;
  std::vector<int64_t> sizes(shape, shape + dim), strides(static_cast<size_t>(dim));
  sizes.back() = width;
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  Handle made = nullptr;
  done(torch.aoti_torch_empty_strided(dim, sizes.data(), strides.data(), code, torch.aoti_torch_device_type_cpu(), 0,
                                      &made));
  Tensor y(made);
  uint32_t threads = 1;
  done(torch.torch_get_num_threads(&threads));

  std::vector<fanfold::PackedCall> now = k->calls;
  uintptr_t y_at = address(y);
  for (size_t i = 0; i < now.size(); ++i) {
    now[i].threads = threads < 1 ? 1 : static_cast<int>(threads);
    now[i].x = pointer(address(x));
    now[i].x_stride = k->inputs;
    now[i].y = pointer<void>(y_at);
    now[i].y_stride = width;
    now[i].tokens = tokens;
    y_at += static_cast<uintptr_t>(k->outputs[i]) * (wide ? 4 : 2);
  }
  const bool together = k->together && tokens <= kTogetherTokens;
  for (size_t i = 1; together && i < now.size(); ++i) {
    now[0].beside[i - 1] = {now[i].down, now[i].y, width};
    now[0].n_beside = static_cast<int>(i);
  }
  for (size_t i = 0; i < (together ? 1 : now.size()); ++i) fanfold::run(*k->kernels, now[i]);
  calls.fetch_add(1, std::memory_order_relaxed);
  return y;
}

// The same by Python, which has the other kinds of x and of errors.
Tensor by_python(Tensor x, std::vector<Tensor> parts, const char* text, size_t length) {
  const nb::gil_scoped_acquire gil;
  std::string error;
  try {
    nb::list handles;
    const auto give = [&](Tensor t) { handles.append(nb::steal(PyCapsule_New(t.release(), nullptr, nullptr))); };
    give(std::move(x));
    for (Tensor& part : parts) give(std::move(part));
    const nb::object y = nb::handle(otherwise)(handles, nb::str(text, length));
    void* const made = PyCapsule_GetPointer(y.ptr(), PyCapsule_GetName(y.ptr()));
    if (made == nullptr) throw nb::python_error();
    return Tensor(made);
  } catch (const nb::python_error& e) {  // PyTorch would make an essay of it, with the traceback in the message
    error = std::string(nb::str(e.type().attr("__name__")).c_str()) + ": " + nb::str(e.value()).c_str();
  }
  throw std::runtime_error(error);
}

void packed_run(Value* stack, uint64_t, uint64_t) {
  Tensor x(handle(stack[0]));
  const std::unique_ptr<void, DeleteList> list(handle(stack[1]));
  const std::unique_ptr<void, DeleteString> description(handle(stack[2]));
  std::vector<Tensor> parts(ask(torch.torch_list_size, list.get()));
  for (size_t i = 0; i < parts.size(); ++i) {
    Value item = 0;
    done(torch.torch_list_get_item(list.get(), i, &item));
    parts[i].reset(handle(item));
  }
  const char* text = nullptr;
  done(torch.torch_string_c_str(description.get(), &text));
  const size_t length = ask(torch.torch_string_length, description.get());
  Tensor y = repeated(x, parts, text, length);
  if (y == nullptr) y = by_python(std::move(x), std::move(parts), text, length);
  stack[0] = static_cast<Value>(reinterpret_cast<uintptr_t>(y.release()));
}

}  // namespace

std::vector<std::string> graph_op_needs() {
  std::vector<std::string> names;
  each_function([&](const char* name, auto&) { names.emplace_back(name); });
  return names;
}

void register_graph_op(const std::map<std::string, uintptr_t>& functions, const nb::callable& python) {
  each_function([&](const char* name, auto& function) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(functions.at(name));
  });
  otherwise = nb::object(python).release().ptr();  // never freed, as the operator never goes
  Handle library = nullptr;                        // nor is this
  done(torch.aoti_torch_library_init_impl("fanfold", "CPU", __FILE__, __LINE__, &library));
  done(torch.torch_library_impl(library, "packed_run", &packed_run, kInterface));
}

void remember_graph_op(const std::string& description, int x_dtype, int64_t inputs, const nb::list& kernels,
                       const std::vector<int64_t>& outputs, bool together, size_t matrices,
                       const std::vector<std::tuple<uintptr_t, int64_t>>& parts) {
  const auto k = std::make_shared<Known>();
  if (nb::len(kernels) == 0 || nb::len(kernels) != outputs.size() || parts.size() < matrices || matrices < 1 ||
      (together && outputs.size() > kMostBeside + 1)) {
    throw nb::value_error("remember_graph_op: expected as many outputs as kernels, and a matrix");
  }
  for (const nb::handle kernel : kernels) {
    const BoundPacked& bound = nb::cast<const BoundPacked&>(kernel);
    k->kernels = bound.kernels;
    k->calls.push_back(bound.call);
  }
  k->description = description;
  k->x_dtype = static_cast<fanfold::DType>(x_dtype);
  k->inputs = inputs;
  k->outputs = outputs;
  k->together = together;
  k->matrices = matrices;
  k->parts = parts;
  const std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < matrices; ++i) {
    const auto place = watched.find(std::get<0>(parts[i]));
    if (place != watched.end()) k->places.push_back(place->second);
  }
  if (known.size() >= kMostKnown) known.clear();
  const uintptr_t first = std::get<0>(parts[0]);
  const auto [begin, end] = known.equal_range(first);
  for (auto i = begin; i != end; ++i) {
    if (i->second->x_dtype == k->x_dtype && i->second->description == description) {
      i->second = k;
      return;
    }
  }
  known.emplace(first, k);
}

void forget_graph_op() {
  const std::lock_guard<std::mutex> lock(mutex);
  known.clear();
}

void watch_matrix(uintptr_t matrix, uintptr_t place, int64_t word) {
  const std::lock_guard<std::mutex> lock(mutex);
  watched[matrix] = {place, word};
  known.clear();  // may know of another one
}

void unwatch_matrix(uintptr_t matrix, uintptr_t place) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = watched.find(matrix);
  if (found == watched.end() || found->second.at != place) return;
  watched.erase(found);
  known.clear();
}

bool is_written(uintptr_t matrix) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = watched.find(matrix);
  return found != watched.end() && found->second.written();
}

uint64_t graph_op_calls() { return calls.load(std::memory_order_relaxed); }
