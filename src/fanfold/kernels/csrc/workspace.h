// Memory for the length of one call, and how many threads a call is worth.
#pragma once

#include <cstddef>

namespace fanfold {

struct Block {
  void* data;
  size_t bytes;
};

// Owns a block for the length of one call, so that two Python threads never share one. Throws std::bad_alloc.
class Lease {
 public:
  explicit Lease(size_t bytes);
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease();
  void* data() const { return block_.data; }

 private:
  Block block_;
};

// At most `threads`, fewer where `weights` multiply-adds for each of `tokens` tokens are not worth waking them.
int threads_worth(int threads, double weights, ptrdiff_t tokens);

}  // namespace fanfold
