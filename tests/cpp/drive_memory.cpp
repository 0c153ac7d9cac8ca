// Every kernel on buffers of exact size, under AddressSanitizer and UBSan.
//   drive_memory heap|pages ISA [part]   ISA: a name, or "list" for the names; part: packed, plain, odd or all
//   drive_memory heap|pages short        one matrix a line too short: must die (shows that the driver sees it)
#include <cfloat>
#include <string>
#include <vector>

#include "calls.h"

namespace {

using fanfold::DType;
constexpr DType kTypes[] = {fanfold::kFloat32, fanfold::kBFloat16};

// Widths on, below and above the units of every layout: 2, 4, 8 inputs, 16 lanes, groups of 32 … 256, spans of 512.
constexpr Shape kEveryCount = {33, 50};  // with each token count of 1 … 70
constexpr Shape kOddShapes[] = {{1, 1},    {1, 19},   {17, 1},    {46, 64},   {64, 47}, {130, 97},
                                {97, 300}, {258, 35}, {1100, 33}, {31, 1037}, {48, 20}};
constexpr ptrdiff_t kSomeCounts[] = {1, 2, 5, 13, 17, 33, 48, 70, 300};

// The call twice, with another count of threads and another garbage in the workspace: the same bits, and only in y.
template <class AnyKernels, class AnyCall>
void check(const AnyKernels& kernels, const AnyCall& call) {
  const Output one = output_of(kernels, call, 1, 0xff), more = output_of(kernels, call, 2 + call.tokens % 2, 0x5a);
  if (!one.same(more)) wrong("y depends on threads or on what lay in the workspace");
  if (!one.complete(outputs(call) > 8 && call.act == fanfold::kSilu)) wrong("y is not written, or more than y");
}

int cases = 0;

// Without FANFOLD_SANITIZE_FULL each format sees a share of the sizes, another one than the format before it.
const bool full = std::getenv("FANFOLD_SANITIZE_FULL") != nullptr;
int turn = 0;
bool taken(int shares) { return full || turn++ % shares == 0; }

template <class AnyKernels, class AnyCall>
void tokens(const AnyKernels& kernels, AnyCall call, DType type, ptrdiff_t count) {
  const ptrdiff_t gap = cases % 3;
  const Buffer x = numbers(count, inputs(call), inputs(call) + gap, type);
  set_activation(&call, cases % 2 ? fanfold::kSilu : cases / 2, cases % 5 == 0);
  set_tokens(&call, x, type, count, gap);
  const size_t length = strlen(current_case);
  snprintf(current_case + length, sizeof current_case - length, " x %d tokens %td gap %td act %d", type, count, gap,
           call.act);
  check(kernels, call);
  current_case[length] = 0;
  ++cases;
}

void packed(const fanfold::Isa& isa, Mode m, DType type) {
  const auto layer = [&](Kind kind, Shape s) {
    snprintf(current_case, sizeof current_case, "packed %s format %d int8 activations %d kind %d shape %td %td",
             isa.name, m.format, m.int8_activations, kind, s.d_model, s.d_ff);
    return packed_layer(kind, m, s, cases % 2 == 0);
  };
  const PackedLayer every = layer(kGatedFfn, kEveryCount);
  for (ptrdiff_t count = 1; count <= 70; ++count) {
    if (taken(3)) tokens(*isa.packed, every.call, type, count);
  }
  for (const Shape s : kOddShapes) {
    const PackedLayer odd = layer(static_cast<Kind>(cases % kKinds), s);
    for (const ptrdiff_t count : kSomeCounts) {
      if (taken(4)) tokens(*isa.packed, odd.call, type, count);
    }
  }
}

// Products of one x in one pass: each as alone, and only in its own y.
void beside(const fanfold::Isa& isa, Mode m, DType type) {
  constexpr Shape kShapes[] = {{70, 50}, {70, 17}, {70, 33}, {70, 1}};
  PackedLayer layers[4];
  for (int i = 0; i < 4; ++i) layers[i] = packed_layer(kLinear, m, kShapes[i], i % 2 == 0);
  for (const ptrdiff_t count : {1, 5, 16, 60, 300}) {
    snprintf(current_case, sizeof current_case, "beside %s format %d int8 activations %d x %d tokens %td", isa.name,
             m.format, m.int8_activations, type, count);
    const Buffer x = numbers(count, 70, 70, type);
    std::vector<Output> alone, together;
    for (PackedLayer& l : layers) {
      set_tokens(&l.call, x, type, count, 0);
      alone.push_back(output_of(*isa.packed, l.call, 2, 0xff));
      together.emplace_back(count, outputs(l.call), outputs(l.call), type);
    }
    fanfold::PackedCall call = layers[0].call;
    call.threads = 3;
    call.y = together[0].buffer.data();
    call.n_beside = 3;
    for (int i = 0; i < 3; ++i) {
      call.beside[i] = {layers[i + 1].call.down, together[i + 1].buffer.data(), outputs(layers[i + 1].call)};
    }
    fanfold::run(*isa.packed, call);
    for (int i = 0; i < 4; ++i) {
      if (!together[i].same(alone[i])) wrong("a product beside another is not what it is alone");
    }
    ++cases;
  }
}

void plain(const fanfold::Isa& isa, DType w, DType type, bool transposed) {
  const auto layer = [&](Kind kind, Shape s) {
    snprintf(current_case, sizeof current_case, "in place %s weights %d transposed %d kind %d shape %td %td", isa.name,
             w, transposed, kind, s.d_model, s.d_ff);
    return plain_layer(kind, w, transposed, s, cases % 4, cases % 2 == 0);
  };
  const PlainLayer every = layer(kGatedFfn, kEveryCount);
  for (ptrdiff_t count = 1; count <= 70; ++count) {
    if (taken(3)) tokens(*isa.kernels, every.call, type, count);
  }
  for (const Shape s : kOddShapes) {
    for (int kind = 0; kind < kKinds; ++kind) {
      const PlainLayer odd = layer(static_cast<Kind>(kind), s);
      for (const ptrdiff_t count : kSomeCounts) {
        if (taken(4)) tokens(*isa.kernels, odd.call, type, count);
      }
    }
  }
}

// Infinities, NaN, the largest and the smallest numbers: no undefined conversion, and `run`'s second attempt.
constexpr float kStrange[] = {INFINITY, -INFINITY, NAN, FLT_MAX, -FLT_MAX, 1e-42f, -1e-45f, FLT_MIN, 0.0f, -0.0f};

void odd_values(const fanfold::Isa& isa) {
  for (int i = 0; i < kModes; ++i) {
    PackedLayer l = packed_layer(kGatedFfn, mode(i), {40, 70}, true);
    for (const float value : kStrange) {
      for (const ptrdiff_t count : {1, 6, 60}) {
        snprintf(current_case, sizeof current_case, "value %g %s mode %d tokens %td", value, isa.name, i, count);
        const Buffer x = numbers(count, 40, 40, fanfold::kFloat32);
        put_number(x.data() + 4 * 7, fanfold::kFloat32, value);
        set_activation(&l.call, static_cast<int>(count) + i, false);
        set_tokens(&l.call, x, fanfold::kFloat32, count, 0);
        const Output y(count, 40, 40, fanfold::kFloat32);
        l.call.y = y.buffer.data();
        l.call.threads = 2;
        fanfold::run(*isa.packed, l.call);
      }
    }
  }
}

void activations(const fanfold::Isa& isa) {
  const double params[4] = {0.5, 0.5, 0.5, 0.5};
  for (int act = 0; act < fanfold::kActCount; ++act) {
    for (ptrdiff_t n = 1; n <= 40; ++n) {
      snprintf(current_case, sizeof current_case, "activation %d %s n %td", act, isa.name, n);
      const Buffer from = numbers(1, n, n, fanfold::kFloat32), to = numbers(1, n, n, fanfold::kFloat32);
      for (ptrdiff_t i = 0; i < n; i += 2) {
        const float value = i % 4 == 0 ? kStrange[(i / 4 + n) % 10] : 200.0f * random_float();
        put_number(from.data() + 4 * i, fanfold::kFloat32, value);
      }
      isa.kernels->activation(act, params, from.as<float>(), to.as<float>(), n);
    }
  }
}

// The middle of an FFN in training: every activation, type and width, with and without each part.
void middles(const fanfold::Isa& isa) {
  for (int act = 0; act < fanfold::kActCount; ++act) {
    for (const ptrdiff_t width : {1, 15, 16, 33}) {
      for (const DType type : kTypes) {
        const ptrdiff_t count = 1 + cases % 9, gap = cases % 3, stride = width + gap;
        const bool gated = cases % 2 == 0, clamped = cases % 5 == 0;
        snprintf(current_case, sizeof current_case, "middle %d %s width %td x %d tokens %td gap %td", act, isa.name,
                 width, type, count, gap);
        Buffer parts[6];
        fanfold::Rows rows[6];
        for (int i = 0; i < 6; ++i) {
          parts[i] = numbers(count, width, stride, type);
          rows[i] = {parts[i].data(), stride};
        }
        put_number(parts[1].data(), type, kStrange[cases % 10]);
        const Buffer mask(static_cast<size_t>((count - 1) * width + width), 1);
        memset(mask.data(), cases % 2, mask.size());
        fanfold::Middle c;
        c.threads = 1 + cases % 3;
        c.dtype = type;
        c.tokens = count;
        c.d_ff = width;
        if (gated) c.gate = rows[0];
        c.up = rows[1];
        c.m = cases % 4 == 0 ? rows[1] : rows[5];
        if (cases % 7 != 0) {
          c.grad = rows[2];
          if (gated) c.to_gate = cases % 3 == 0 ? rows[0] : rows[3];
          c.to_up = cases % 4 == 1 ? rows[2] : rows[4];
        }
        if (cases % 3 != 0) {
          c.mask = mask.data();
          c.mask_stride = width;
        }
        c.act = act;
        for (double& value : c.params) value = 0.5;
        c.gate_limit = c.up_limit = clamped ? 0.5f : INFINITY;
        isa.kernels->middle(c);
        ++cases;
      }
    }
  }
}

// RMS norms: widths that fill no vector, strides, x written over by y.
void norms(const fanfold::Isa& isa) {
  for (const ptrdiff_t width : {1, 15, 16, 33, 64, 130}) {
    for (const DType type : kTypes) {
      for (const ptrdiff_t count : {1, 3, 40}) {
        const ptrdiff_t gap = cases % 3, stride = width + gap;
        snprintf(current_case, sizeof current_case, "norm %s width %td x %d tokens %td gap %td", isa.name, width, type,
                 count, gap);
        const Buffer x = numbers(count, width, stride, type), y = numbers(count, width, width, type);
        const Buffer weight = numbers(1, width, width, type);
        put_number(x.data(), type, kStrange[cases % 10]);
        fanfold::Norm c;
        c.threads = 3;
        c.x = x.data();
        c.x_stride = stride;
        c.y = cases % 2 == 0 ? x.data() : y.data();
        c.y_stride = cases % 2 == 0 ? stride : width;
        c.tokens = count;
        c.width = width;
        c.dtype = type;
        c.weight = weight.data();
        c.eps = 1e-5;
        isa.kernels->norm(c);
        ++cases;
      }
    }
  }
}

// The search for scales: rows that fill no vector, a short last group, numbers of any size; one thread and three agree.
void fits(const fanfold::Isa& isa) {
  for (const ptrdiff_t n : {1, 5, 16, 37}) {
    for (const ptrdiff_t k : {1, 31, 64, 300}) {
      for (const ptrdiff_t group : {ptrdiff_t{32}, ptrdiff_t{128}, k}) {
        snprintf(current_case, sizeof current_case, "fit %s n %td k %td group %td", isa.name, n, k, group);
        FitCase f = fit_case(n, k, group, cases % 2 == 0, cases % 3);
        put_number(f.w.data(), fanfold::kFloat32, cases % 5 == 0 ? 1e-45f : cases % 7 == 0 ? FLT_MAX : 0.0f);
        const FitResult one = f.run(*isa.fit, 1), more = f.run(*isa.fit, 3);
        if (!one.same(more)) wrong("codes or scales depend on the number of threads");
        ++cases;
      }
    }
  }
}

void drive(const fanfold::Isa& isa, const std::string& part) {
  if (part == "all" || part == "packed") {
    for (int i = 0; i < kModes; ++i) {
      for (const DType type : kTypes) packed(isa, mode(i), type), beside(isa, mode(i), type);
    }
  }
  if (part == "all" || part == "plain") {
    for (const DType w : kTypes) {
      for (const DType type : kTypes) {
        for (const bool transposed : {false, true}) plain(isa, w, type, transposed);
      }
    }
  }
  if (part == "all" || part == "odd") {
    odd_values(isa);
    activations(isa);
    middles(isa);
    norms(isa);
    fits(isa);
  }
  printf("%s: %d cases\n", isa.name, cases);
}

int one_too_short() {
  snprintf(current_case, sizeof current_case, "a matrix without its last line");
  PackedLayer l = packed_layer(kLinear, {fanfold::kQ4_1, true}, {64, 32}, false, 64);
  const Buffer x = numbers(3, 64, 64, fanfold::kFloat32);
  set_tokens(&l.call, x, fanfold::kFloat32, 3, 0);
  output_of(*fanfold::isa(0)->packed, l.call, 1, 0);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  name_cases();
  const std::string memory = argc > 1 ? argv[1] : "", name = argc > 2 ? argv[2] : "", part = argc > 3 ? argv[3] : "all";
  if (memory == "pages") Buffer::memory = Memory::pages;
  if (name == "short") return one_too_short();
  for (int i = 0; i < fanfold::isa_count(); ++i) {
    const fanfold::Isa* const isa = fanfold::isa(i);
    if (isa == nullptr) continue;
    if (name == "list") puts(isa->name);
    if (name != isa->name) continue;
    drive(*isa, part);
    return 0;
  }
  if (name == "list") return 0;
  fprintf(stderr, "no instruction set %s here; see: drive_memory heap list\n", name.c_str());
  return 2;
}
