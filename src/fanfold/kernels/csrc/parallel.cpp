#include "parallel.h"

#include <omp.h>

namespace fanfold {

void parallel(int threads, void (*body)(int, int, void*), void* arg) {
  if (threads <= 1) {
    body(0, 1, arg);
    return;
  }
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num(), omp_get_num_threads(), arg);
}

void team_barrier() {
#pragma omp barrier
}

}  // namespace fanfold
