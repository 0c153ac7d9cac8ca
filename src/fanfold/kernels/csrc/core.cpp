// Choice of the instruction set, and the cache of workspaces.
#include "core.h"

#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace fanfold {

extern const Kernels kKernelsScalar;
#ifdef FANFOLD_X86
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
#endif

const Kernels* kernels(int isa) {
  if (isa == 0) return &kKernelsScalar;
#ifdef FANFOLD_X86
  __builtin_cpu_init();
  if (isa == 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kKernelsAvx2;
  if (isa == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return &kKernelsAvx512;
  }
#endif
  return nullptr;
}

const char* const* activation_names() {
  static const char* const names[kActCount] = {"relu", "relu2",   "gelu_erf",   "gelu_tanh", "gelu_sigmoid",
                                               "silu", "sigmoid", "tanh",       "identity",  "softplus",
                                               "elu",  "mish",    "leaky_relu", "xielu"};
  return names;
}

namespace {

constexpr size_t kAlign = 64;
constexpr size_t kKeepBytes = size_t{64} << 20;  // what the cache may hold on to between calls

constexpr size_t kKeepBlocks = 8;

struct Block {
  float* data;
  size_t bytes;
};

// Blocks that no call is using. Leaked on purpose: a daemon thread may still compute while statics are destroyed.
struct Cache {
  std::mutex mutex;
  std::vector<Block> free;
  size_t bytes = 0;
};

Cache& cache() {
  static Cache* const instance = [] {
    auto* made = new Cache;
    made->free.reserve(kKeepBlocks);  // so that giving a block back cannot throw
    return made;
  }();
  return *instance;
}

// Owns a block for the length of one call, so that two Python threads never share one.
class Lease {
 public:
  explicit Lease(size_t floats) : block_{nullptr, (floats * sizeof(float) + kAlign) / kAlign * kAlign} {
    {
      Cache& c = cache();
      const std::lock_guard<std::mutex> lock(c.mutex);
      if (!c.free.empty()) {
        const Block found = c.free.back();
        c.free.pop_back();
        c.bytes -= found.bytes;
        if (found.bytes >= block_.bytes) {
          block_ = found;
        } else {
          std::free(found.data);  // grow only: the larger one that follows takes its place
        }
      }
    }
    if (block_.data == nullptr) block_.data = static_cast<float*>(std::aligned_alloc(kAlign, block_.bytes));
    if (block_.data == nullptr) throw std::bad_alloc();
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() {
    Cache& c = cache();
    const std::lock_guard<std::mutex> lock(c.mutex);
    if (c.bytes + block_.bytes > kKeepBytes || c.free.size() >= kKeepBlocks) {
      std::free(block_.data);
      return;
    }
    c.free.push_back(block_);
    c.bytes += block_.bytes;
  }
  float* data() const { return block_.data; }

 private:
  Block block_;
};

}  // namespace

void run(const Kernels& isa, const Call& given) {
  if (given.tokens <= 0) return;
  Call call = given;
  // A thread is worth waking for some 5 microseconds: 16 Ki weights to read, or 8 times as many multiply-adds.
  const ptrdiff_t inputs = call.d_model * ((call.gate.data != nullptr) + (call.up.data != nullptr)) + call.d_out;
  const double weights = static_cast<double>(inputs) * static_cast<double>(call.d_ff);
  const double worth = weights * (call.tokens > 8 ? static_cast<double>(call.tokens) / 8 : 1.0) / 16384;
  if (worth < call.threads) call.threads = worth < 1 ? 1 : static_cast<int>(worth);
  const Lease lease(isa.workspace(call));
  isa.run(call, lease.data());
}

}  // namespace fanfold
