// parallel.h on std::thread, all of which ThreadSanitizer sees: it takes parallel.cpp's place in drive_races.
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "parallel.h"

namespace fanfold {

namespace {

class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++here_ == threads_) {
      here_ = 0;
      ++round_;
      all_here_.notify_all();
    }
    all_here_.wait(lock, [&] { return round_ != round; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  const int threads_;
  int here_ = 0, round_ = 0;
};

thread_local Barrier* team = nullptr;

// For the check that a race is found at all: nobody waits for anybody.
const bool broken = std::getenv("FANFOLD_BROKEN_BARRIER") != nullptr;

}  // namespace

void parallel(int threads, void (*body)(int, int, void*), void* arg) {
  if (threads <= 1) {
    body(0, 1, arg);
    return;
  }
  Barrier barrier(threads);
  const auto work = [&](int thread) {
    team = &barrier;
    body(thread, threads, arg);
    team = nullptr;
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& t : others) t.join();
}

void team_barrier() {
  if (!broken) team->wait();
}

}  // namespace fanfold
