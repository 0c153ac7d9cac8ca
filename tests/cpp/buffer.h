// Memory of exactly the size that was asked for, so that one byte too many is noticed.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

// heap: AddressSanitizer watches the bytes around it. pages: an unmapped page lies behind it, which stops instructions
// too that no sanitizer sees (the matrix unit's loads and stores are assembly to the compiler).
enum class Memory { heap, pages };

class Buffer {
 public:
  static inline Memory memory = Memory::heap;
  static constexpr size_t kPage = 4096;

  Buffer() = default;
  // `align` bytes; in pages it leaves bytes % align unwatched, before which the buffer begins
  explicit Buffer(size_t bytes, size_t align = 64) : bytes_(bytes) {
    if (memory == Memory::heap) {
      if (posix_memalign(&whole_, align < sizeof(void*) ? sizeof(void*) : align, bytes) != 0) fail();
      data_ = static_cast<uint8_t*>(whole_);
      return;
    }
    const size_t inner = (bytes + align - 1) / align * align;
    mapped_ = (inner + kPage - 1) / kPage * kPage + kPage;
    whole_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole_ == MAP_FAILED) fail();
    uint8_t* const guard = static_cast<uint8_t*>(whole_) + mapped_ - kPage;
    if (mprotect(guard, kPage, PROT_NONE) != 0) fail();
    data_ = guard - inner;
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
    if (mapped_ != 0) {
      munmap(whole_, mapped_);
    } else {
      free(whole_);
    }
  }

  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  void fill(int byte) { memset(data_, byte, bytes_); }

 private:
  void swap(Buffer& other) {
    std::swap(whole_, other.whole_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
  }
  [[noreturn]] void fail() const {
    fprintf(stderr, "no memory for %zu bytes\n", bytes_);
    abort();
  }

  void* whole_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0, mapped_ = 0;
};
