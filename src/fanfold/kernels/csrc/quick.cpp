// The checks and the call in C: by the next token a decoding model has streamed megabytes of weights through the
// caches, and each Python object and byte code that is touched then comes from memory.
#include "quick.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "bound.h"

namespace nb = nanobind;

namespace {

// In the order of quick.py's plan.
enum Item {
  kKernel,  // Bound, BoundNorm or BoundPacked
  kTensor,  // the type of x
  kDtype,   // of x
  kInputs,  // of a token
  kOutputs,
  kLimit,         // most tokens, or a callable that says of their number whether to run
  kThreads,       // torch.get_num_threads
  kEmptyLike,     // torch.empty_like
  kSurroundings,  // as kCalls, but what differs now may be as it was at the next call
  kSizes,
  kWatched,
  kBare,
  kAttributes,
  kCalls,
  kPlaces,  // (address, 8 bytes as an integer, …)
  kLetters,
  kBesides,
};

// … of what is to be computed in the same pass.
enum Beside { kItsKernel, kItsOutputs, kItsLetters, kItsTensors };

// In the order of an entry of packed_op.py's `_ready`.
enum Ready {
  kReadyKernel,
  kReadyDtype,  // of x
  kReadyInputs,
  kReadyOutputs,
  kReadyPlaces,  // (address, elements, …) of the tensors; 0 for an absent one
  kReadyTypes,   // their dtypes
  kReadyThreads,
  kReadyEmptyLike,
};

constexpr Py_ssize_t kLetterParts = 6;

struct Names {
  static PyObject* intern(const char* text) {
    PyObject* const name = PyUnicode_InternFromString(text);
    if (name == nullptr) throw nb::python_error();
    return name;
  }
  PyObject* const dtype = intern("dtype");
  PyObject* const size = intern("size");
  PyObject* const shape = intern("shape");
  PyObject* const is_cpu = intern("is_cpu");
  PyObject* const is_contiguous = intern("is_contiguous");
  PyObject* const data_ptr = intern("data_ptr");
  PyObject* const numel = intern("numel");
  PyObject* const new_empty = intern("new_empty");
  PyObject* const version = intern("_version");
  PyObject* const forward = intern("forward");
  PyObject* const minus_one = PyLong_FromLong(-1);
};

const Names& names() {
  static const Names* const made = new Names;  // never freed: they may be used until the process ends
  return *made;
}

PyObject* at(PyObject* tuple, Py_ssize_t i) { return PyTuple_GetItem(tuple, i); }
PyObject* at(const nb::tuple& plan, Item i) { return PyTuple_GetItem(plan.ptr(), i); }

nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

nb::object get(PyObject* of, PyObject* name) { return checked(PyObject_GetAttr(of, name)); }

nb::object call_method(PyObject* of, PyObject* name, PyObject* argument = nullptr) {
  PyObject* const arguments[] = {of, argument};
  return checked(PyObject_VectorcallMethod(name, arguments, argument == nullptr ? 1 : 2, nullptr));
}

int64_t integer(const nb::object& from) {
  const long long value = PyLong_AsLongLong(from.ptr());
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

uintptr_t address(PyObject* tensor) {
  const nb::object found = call_method(tensor, names().data_ptr);
  const unsigned long long value = PyLong_AsUnsignedLongLong(found.ptr());
  if (value == ~0ULL && PyErr_Occurred()) throw nb::python_error();
  return static_cast<uintptr_t>(value);
}

int64_t number(PyObject* from) { return integer(nb::borrow(from)); }

bool equal(PyObject* a, PyObject* b) {
  const int same = PyObject_RichCompareBool(a, b, Py_EQ);
  if (same < 0) throw nb::python_error();
  return same == 1;
}

// Whether `tokens` are within a limit, or a callable says that they are ours.
bool ours(PyObject* limit, int64_t tokens) {
  if (PyLong_Check(limit)) return tokens <= number(limit);
  const nb::object given = checked(PyLong_FromLongLong(tokens));
  const int said = PyObject_IsTrue(checked(PyObject_CallFunctionObjArgs(limit, given.ptr(), nullptr)).ptr());
  if (said < 0) throw nb::python_error();
  return said == 1;
}

// (callable, result, …): calling it gives an equal result.
bool answers(PyObject* calls) {
  for (Py_ssize_t i = 0, n = PyTuple_Size(calls); i < n; i += 2) {
    const nb::object now = checked(PyObject_CallNoArgs(at(calls, i)));
    if (now.ptr() != at(calls, i + 1) && !equal(now.ptr(), at(calls, i + 1))) return false;
  }
  return true;
}

bool holds(const nb::tuple& plan) {
  PyObject* const sizes = at(plan, kSizes);
  for (Py_ssize_t i = 0, n = PyTuple_Size(sizes); i < n; i += 2) {
    if (PyDict_Size(at(sizes, i)) != PyLong_AsSsize_t(at(sizes, i + 1))) return false;
  }
  PyObject* const watched = at(plan, kWatched);
  for (Py_ssize_t i = 0, n = PyTuple_Size(watched); i < n; i += 3) {
    if (PyDict_GetItemWithError(at(watched, i), at(watched, i + 1)) != at(watched, i + 2)) return false;
  }
  PyObject* const bare = at(plan, kBare);
  for (Py_ssize_t i = 0, n = PyTuple_Size(bare); i < n; i += 3) {
    if ((PyObject*)Py_TYPE(at(bare, i)) != at(bare, i + 1)) return false;
    if (PyDict_GetItemWithError(at(bare, i + 2), names().forward) != nullptr) return false;
  }
  PyObject* const attributes = at(plan, kAttributes);
  for (Py_ssize_t i = 0, n = PyTuple_Size(attributes); i < n; i += 3) {
    if (get(at(attributes, i), at(attributes, i + 1)).ptr() != at(attributes, i + 2)) return false;
  }
  PyObject* const places = at(plan, kPlaces);
  for (Py_ssize_t i = 0, n = PyTuple_Size(places); i < n; i += 2) {
    int64_t now;
    std::memcpy(&now, pointer<const void>(static_cast<uintptr_t>(number(at(places, i)))), sizeof now);
    if (now != number(at(places, i + 1))) return false;
  }
  return answers(at(plan, kCalls));
}

void clear(PyObject* list) {
  if (PyList_SetSlice(list, 0, PyList_Size(list), nullptr) < 0) throw nb::python_error();
}

// Whether x is contiguous, of this dtype, and `inputs` wide. A negative view (of a conjugate) is never contiguous, as
// its stride is 2: hence no width of 1 ever comes here.
bool rows(PyObject* x, PyObject* dtype, PyObject* inputs) {
  return get(x, names().dtype).ptr() == dtype && equal(call_method(x, names().size, names().minus_one).ptr(), inputs) &&
         call_method(x, names().is_contiguous).ptr() == Py_True;
}

int threads_of(PyObject* question) { return static_cast<int>(integer(checked(PyObject_CallNoArgs(question)))); }

// How often a tensor was written to; nothing where that is not counted.
nb::object version_of(PyObject* tensor) {
  PyObject* const found = PyObject_GetAttr(tensor, names().version);
  if (found == nullptr) PyErr_Clear();
  return nb::steal(found);
}

// Like x but for `outputs` in place of its last size, if that is another one.
nb::object empty(PyObject* empty_like, PyObject* x, int64_t inputs, PyObject* outputs) {
  if (number(outputs) == inputs) return checked(PyObject_CallFunctionObjArgs(empty_like, x, nullptr));
  const nb::object shape = get(x, names().shape);
  const Py_ssize_t n = PyTuple_Size(shape.ptr());
  const nb::object own = checked(PyTuple_New(n));
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* const size = i + 1 < n ? at(shape.ptr(), i) : outputs;
    Py_INCREF(size);
    PyTuple_SetItem(own.ptr(), i, size);
  }
  return call_method(x, names().new_empty, own.ptr());
}

// The same of each of a tuple of tensors.
nb::object versions_of(PyObject* tensors) {
  const Py_ssize_t n = PyTuple_Size(tensors);
  const nb::object versions = checked(PyTuple_New(n));
  for (Py_ssize_t i = 0; i < n; ++i) {
    nb::object one = version_of(at(tensors, i));
    if (!one.is_valid()) return {};
    PyTuple_SetItem(versions.ptr(), i, one.release().ptr());
  }
  return versions;
}

// What came for this product with an earlier one's call, if it was for this x as it is and these weights as they are.
nb::object take_letter(PyObject* letters, PyObject* x, uintptr_t x_at) {
  const auto part = [&](Py_ssize_t i) { return nb::borrow(PyList_GetItem(letters, i)); };
  const nb::object tensor = part(0), place = part(1), version = part(2), y = part(3), read = part(4),
                   versions = part(5);
  clear(letters);
  if (tensor.ptr() != x || static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(place.ptr())) != x_at) return {};
  const nb::object now = version_of(x), of_read = versions_of(read.ptr());
  if (!now.is_valid() || !equal(now.ptr(), version.ptr())) return {};
  return of_read.is_valid() && equal(of_read.ptr(), versions.ptr()) ? y : nb::object();
}

}  // namespace

nb::object attempt(const nb::tuple& plan, nb::handle given) {
  PyObject* const x = given.ptr();
  if ((PyObject*)Py_TYPE(x) != at(plan, kTensor)) return nb::none();
  if (get(x, names().is_cpu).ptr() != Py_True || !rows(x, at(plan, kDtype), at(plan, kInputs))) return nb::none();
  if (!answers(at(plan, kSurroundings))) return nb::none();  // before the address: a functorch wrapper has none
  const int64_t inputs = number(at(plan, kInputs)), tokens = integer(call_method(x, names().numel)) / inputs;
  const uintptr_t x_at = address(x);
  if (x_at == 0 && tokens != 0) return nb::none();
  if (!holds(plan)) return nb::borrow(Py_False);
  if (!ours(at(plan, kLimit), tokens)) return nb::borrow(Py_True);

  PyObject* const letters = at(plan, kLetters);
  if (PyList_Size(letters) == kLetterParts) {
    const nb::object y = take_letter(letters, x, x_at);
    if (y.is_valid()) return y;
  }
  PyObject* const outputs = at(plan, kOutputs);
  const int64_t n_out = number(outputs);
  const int threads = threads_of(at(plan, kThreads));
  const nb::object y = empty(at(plan, kEmptyLike), x, inputs, outputs);
  const nb::handle kernel = at(plan, kKernel);
  if (nb::isinstance<Bound>(kernel)) {
    nb::cast<const Bound&>(kernel).run(threads, x_at, inputs, address(y.ptr()), n_out, tokens);
    return y;
  }
  if (nb::isinstance<BoundNorm>(kernel)) {
    nb::cast<const BoundNorm&>(kernel).run(threads, x_at, inputs, address(y.ptr()), n_out, tokens);
    return y;
  }
  const BoundPacked& packed = nb::cast<const BoundPacked&>(kernel);
  fanfold::PackedCall call = packed.with(threads, x_at, inputs, address(y.ptr()), n_out, tokens);

  PyObject* const besides = at(plan, kBesides);
  constexpr int kMost = fanfold::PackedCall::kMostBeside;
  nb::object others[kMost], ys[kMost], versions[kMost], version;
  if (PyList_Size(besides) != 0 && tokens <= kTogetherTokens) version = version_of(x);
  for (Py_ssize_t i = 0; version.is_valid() && i < PyList_Size(besides) && i < kMost;) {
    others[i] = nb::borrow(PyList_GetItem(besides, i));
    PyObject* const one = others[i].ptr();
    versions[i] = versions_of(at(one, kItsTensors));
    // nobody asked for the last, as it was not given the same x; or nobody could tell whether it is still good
    if (PyList_Size(at(one, kItsLetters)) != 0 || !versions[i].is_valid()) {
      clear(at(one, kItsLetters));
      if (PyList_SetSlice(besides, i, i + 1, nullptr) < 0) throw nb::python_error();
      continue;
    }
    PyObject* const width = at(one, kItsOutputs);
    ys[i] = empty(at(plan, kEmptyLike), x, inputs, width);
    const BoundPacked& its = nb::cast<const BoundPacked&>(nb::handle(at(one, kItsKernel)));
    call.beside[i] = {its.call.down, pointer<void>(address(ys[i].ptr())), number(width)};
    call.n_beside = static_cast<int>(++i);
  }
  {
    const nb::gil_scoped_release release;
    fanfold::run(*packed.kernels, call);
  }
  const nb::object place = checked(PyLong_FromUnsignedLongLong(x_at));
  for (int i = 0; i < call.n_beside; ++i) {
    PyObject* const letters_of = at(others[i].ptr(), kItsLetters);
    clear(letters_of);
    PyObject* const read = at(others[i].ptr(), kItsTensors);
    for (PyObject* const part : {x, place.ptr(), version.ptr(), ys[i].ptr(), read, versions[i].ptr()}) {
      if (PyList_Append(letters_of, part) < 0) throw nb::python_error();
    }
  }
  return y;
}

nb::object repeat(const nb::dict& ready, nb::handle given, const nb::tuple& tensors, nb::handle description) {
  if (std::getenv("FANFOLD_ISA") != nullptr) return nb::none();  // may be another one than when it was bound
  PyObject* const x = given.ptr();
  const Py_ssize_t n = PyTuple_Size(tensors.ptr());
  Py_ssize_t first = 0;
  while (first + 1 < n && at(tensors.ptr(), first) == Py_None) ++first;
  const nb::object place = call_method(at(tensors.ptr(), first), names().data_ptr);
  const nb::object key = checked(PyTuple_Pack(2, description.ptr(), place.ptr()));
  PyObject* const found = PyDict_GetItemWithError(ready.ptr(), key.ptr());
  if (found == nullptr) {
    if (PyErr_Occurred()) throw nb::python_error();
    return nb::none();
  }
  const nb::tuple entry = nb::borrow<nb::tuple>(found);  // another thread may clear `ready` meanwhile
  const auto item = [&](Ready i) { return PyTuple_GetItem(entry.ptr(), i); };
  if (!rows(x, item(kReadyDtype), item(kReadyInputs))) return nb::none();
  PyObject* const places = item(kReadyPlaces);
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* const tensor = at(tensors.ptr(), i);
    PyObject *const expected = at(places, 2 * i), *const size = at(places, 2 * i + 1);
    if (tensor == Py_None) {
      if (number(expected) != 0) return nb::none();
      continue;
    }
    // matrices are bytes, biases float32
    if (get(tensor, names().dtype).ptr() != at(item(kReadyTypes), i) ||
        call_method(tensor, names().is_contiguous).ptr() != Py_True ||
        !equal(call_method(tensor, names().data_ptr).ptr(), expected) ||
        !equal(call_method(tensor, names().numel).ptr(), size)) {
      return nb::none();
    }
  }
  const int64_t inputs = number(item(kReadyInputs)), tokens = integer(call_method(x, names().numel)) / inputs;
  const nb::object y = empty(item(kReadyEmptyLike), x, inputs, item(kReadyOutputs));
  nb::cast<const BoundPacked&>(nb::handle(item(kReadyKernel)))
      .run(threads_of(item(kReadyThreads)), address(x), inputs, address(y.ptr()), number(item(kReadyOutputs)), tokens);
  return y;
}
