// Threads: one parallel region of the OpenMP runtime that torch already runs, so that both share one pool.
#pragma once

namespace fanfold {

// Calls body(thread, threads, arg) on up to `threads` threads at once; `threads` as passed is the number granted.
void parallel(int threads, void (*body)(int thread, int threads, void* arg), void* arg);

// Waits until every thread of the region is here. Call it from within `body` only.
void team_barrier();

}  // namespace fanfold
