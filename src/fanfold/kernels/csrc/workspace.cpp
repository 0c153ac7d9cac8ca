#include "workspace.h"

#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace fanfold {

namespace {

constexpr size_t kAlign = 64;
constexpr size_t kKeepBytes = size_t{64} << 20;  // what the cache may hold on to between calls

constexpr size_t kKeepBlocks = 8;

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

}  // namespace

Lease::Lease(size_t bytes) : block_{nullptr, (bytes + kAlign) / kAlign * kAlign} {
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
  if (block_.data == nullptr) block_.data = std::aligned_alloc(kAlign, block_.bytes);
  if (block_.data == nullptr) throw std::bad_alloc();
}

Lease::~Lease() {
  Cache& c = cache();
  const std::lock_guard<std::mutex> lock(c.mutex);
  if (c.bytes + block_.bytes > kKeepBytes || c.free.size() >= kKeepBlocks) {
    std::free(block_.data);
    return;
  }
  c.free.push_back(block_);
  c.bytes += block_.bytes;
}

int threads_worth(int threads, double weights, ptrdiff_t tokens) {
  // A thread is worth waking for some 5 microseconds: 16 Ki weights to read, or 8 times as many multiply-adds.
  const double worth = weights * (tokens > 8 ? static_cast<double>(tokens) / 8 : 1.0) / 16384;
  if (worth >= threads) return threads;
  return worth < 1 ? 1 : static_cast<int>(worth);
}

}  // namespace fanfold
