// FFNs on packed matrices, for one instruction set: included by packed_isa.h inside its namespace. What the tokens
// bring is prepared once (Inputs); the coefficients of a few hundred channels never leave the caches.

constexpr int V = (int)kLanes / W;  // vectors of a column
// Most tokens of a float tile of two columns; 0: no such tiles. Where these are few, more tokens take one column.
constexpr int kPairTokens = W == 16 ? 14 : W == 8 ? 2 : 0;
constexpr int kOneTokens = W == 16 ? 14 : W == 8 ? 6 : 3;  // … of one column
constexpr int kIntPairTokens = W == 16 ? 12 : W == 8 ? 2 : 0;
constexpr int kIntOneTokens = W == 16 ? 12 : W == 8 ? 4 : 2;
// No tiles of one column, half of all that would be compiled: a last, odd column is multiplied twice, the second time
// into room beside it.
constexpr bool kAlwaysPairs = W == 16;
constexpr ptrdiff_t kBlockTokens = 128;    // of one pass over the weights, about
constexpr ptrdiff_t kTileTokens = 32;      // two tiles of the matrix unit
constexpr ptrdiff_t kTilesFrom = 5;        // tokens from which it is the faster way (measured)
constexpr ptrdiff_t kTilesFromCodes = 25;  // … where codes become bfloat16: 24 are two integer tiles
constexpr ptrdiff_t kAheadBytes = 2048;    // how far memory is asked for in advance when nothing else is to do

#include "dot_inl.h"
//
constexpr int kSmallPairTokens = kByPairs && W == 16 ? 6 : kIntPairTokens;  // two sums of each number

#include "inputs_inl.h"
//
#include "tiles_inl.h"
//
#include "expand_inl.h"
//
#include "amx_inl.h"
//
#include "product_inl.h"

struct Plan {
  ptrdiff_t block;                       // tokens of a pass
  ptrdiff_t chunk;                       // channels of a task
  ptrdiff_t down_columns;                // of a task
  bool pair;                             // tiles of two columns
  Inputs x, m;                           // x: what gate and up (or a lone down) multiply; m: the coefficients
  ptrdiff_t ldc;                         // of a task's outputs
  size_t shared, c_floats, lists, each;  // lists: where a thread's list of lines lies in its part
};

INL const Packed& first_matrix(const PackedCall& c) { return c.up.columns != nullptr ? c.up : c.down; }

// Whether coefficients of a lone token can be expected to be exactly zero often, in a format whose lines hold few.
INL bool may_be_sparse(const PackedCall& c) {
  return c.up.columns != nullptr && c.tokens == 1 && (c.act == kRelu || c.act == kRelu2) && c.down.bits >= 16;
}

// The task, of `least` to `most` of `all` (all three in units of `unit`), with which the busiest thread has least to
// do; the smallest of equals.
static ptrdiff_t balanced(ptrdiff_t all, ptrdiff_t threads, ptrdiff_t unit, ptrdiff_t least, ptrdiff_t most) {
  ptrdiff_t best = least, best_load = all + most;
  for (ptrdiff_t task = least; task <= most; task += unit) {
    const ptrdiff_t tasks = div_up(all, task), rounds = div_up(tasks, threads);
    const bool last_alone = tasks == (rounds - 1) * threads + 1;
    const ptrdiff_t load = last_alone ? (rounds - 1) * task + all - (tasks - 1) * task : rounds * task;
    if (load < best_load) best = task, best_load = load;
  }
  return best;
}

// Results do not depend on the tasks' sizes, nor on the threads.
static Plan plan(const PackedCall& c, uintptr_t base) {
  Plan p = {};
  const ptrdiff_t threads = c.threads;
  const bool narrow = c.x_dtype == kBFloat16;
  const Mode first_mode = mode_of(first_matrix(c), narrow, c.tokens), down_mode = mode_of(c.down, narrow, c.tokens);
  // Blocks of about so many tokens, up to half as many more: a short last one would read all weights again. The matrix
  // unit is so quick that reading them is what counts.
  const bool by_rows = is_by_rows(first_mode);
  const ptrdiff_t about = by_rows ? 2 * kBlockTokens : kBlockTokens;
  p.block = div_up(c.tokens, imax((c.tokens + about / 2 - 1) / about, 1));
  if (by_rows) p.block = round_up(p.block, kTileTokens);
  // even for one token: two columns are two streams of memory
  p.pair = kAlwaysPairs || c.tokens <= kPairTokens;
  size_t at = place_inputs(first_matrix(c), p.block, first_mode, p.pair, base, 0, &p.x);
  static_assert(kMostColumns * kLanes >= 2 * 256, "gate's and up's columns of the largest activation group");
  if (c.up.columns != nullptr) {
    at = place_inputs(c.down, p.block, down_mode, p.pair, base, at, &p.m);
    // whole activation groups of down, and some tasks for each thread
    const ptrdiff_t unit = is_quantized(p.m.mode) ? imax(c.down.activation_group, 2 * kLanes) : 2 * kLanes;
    const ptrdiff_t most = imin(round_up(div_up(c.up.n, 8 * threads), unit), imax(128 / unit, 1) * unit);
    p.chunk = balanced(c.up.n, threads, unit, imax(most / 2 / unit, 1) * unit, most);
  }
  ptrdiff_t columns = div_up(c.down.n, kLanes);
  for (int i = 0; i < c.n_beside; ++i) columns += div_up(c.beside[i].matrix.n, kLanes);
  // Few tokens: long streams of memory. Many: short tasks, so that nobody waits long for the last one.
  const ptrdiff_t unit = p.pair ? 2 : 1, most = c.tokens > kTileTokens ? 4 : 8;
  const ptrdiff_t few = imin(round_up(imax(columns / (48 / most * threads), 2), unit), most);
  p.down_columns = balanced(columns, threads, unit, few, most);
  // Even numbers of columns, with room beside a last, odd one; rows a power of two apart would share a few cache sets.
  p.ldc = imax(p.chunk, p.down_columns * kLanes) + kLanes;
  p.shared = at;
  p.c_floats = (size_t)(round_up(p.block, kTileTokens) * p.ldc);
  p.lists = line_up(kScratchBytes + 2 * p.c_floats * sizeof(float));
  p.each = p.lists + (may_be_sparse(c) ? line_up((size_t)c.down.k * sizeof(int32_t)) : 0);
  return p;
}

constexpr double kSparse = 0.6;  // of the lines: skipping the others pays below it (measured)

// Lists the lines that down must read, if few enough. -> what down multiplies.
static Inputs without_zeros(const Packed& m, const Inputs& in, int32_t* lines) {
  Inputs out = in;
  const int per_line = line_inputs(m);
  const ptrdiff_t all = div_up(m.k, per_line);
  ptrdiff_t n = 0;
  for (ptrdiff_t i = 0; i < all; ++i) {
    lines[n] = (int32_t)i;
    n += in.f[i * per_line] != 0.0f || (per_line == 2 && in.f[i * 2 + 1] != 0.0f);  // in.f is padded with zeros
  }
  if ((double)n > kSparse * (double)all) return out;
  out.lines = lines;
  out.n_lines = n;
  return out;
}

struct PackedJob {
  const PackedCall* call;
  uint8_t* workspace;
  ptrdiff_t next[3];  // of inputs, up, down
  int odd;            // an activation was not finite
};

// Columns [first, first + n) of m into `out`, each `pair` of them one entry; a last odd one is left to the caller.
INL void add_columns(Task* task, const Packed& m, ptrdiff_t first, ptrdiff_t n, float* out) {
  const ptrdiff_t step = task->pair ? 2 : 1;
  for (ptrdiff_t i = 0; i + step <= n; i += step) {
    task->matrix[task->count] = &m;
    task->column[task->count] = first + i;
    task->out[task->count++] = out + i * kLanes;
  }
}

// The products of columns [first, first + n) of one or two matrices, gate after up for each.
static void columns_product(const Packed& a, float* a_out, const Packed* b, float* b_out, ptrdiff_t ldc,
                            ptrdiff_t first, ptrdiff_t n, const Plan& p, const Inputs& in, uint8_t* scratch) {
  const ptrdiff_t step = p.pair ? 2 : 1, whole = n / step * step;
  const uint8_t* const after = a.columns + (first + n) * a.column_bytes;
  Task task;
  task.ldc = ldc;
  const auto run = [&](ptrdiff_t from, ptrdiff_t count, bool pair) {
    task.count = 0;
    task.pair = pair;
    for (ptrdiff_t i = 0; i < count; i += pair ? 2 : 1) {
      add_columns(&task, a, first + from + i, pair ? 2 : 1, a_out + (from + i) * kLanes);
      if (b != nullptr) add_columns(&task, *b, first + from + i, pair ? 2 : 1, b_out + (from + i) * kLanes);
    }
    if (task.count > 0) product(task, in, after, scratch);
  };
  run(0, whole, p.pair);
  run(whole, n - whole, false);
}

// The coefficients of channels [f0, f0 + chunk) of all tokens, made ready for down.
static bool up_task(const PackedCall& c, const Plan& p, ptrdiff_t f0, uint8_t* own) {
  float* const up = (float*)(own + kScratchBytes);
  float* const gate = up + p.c_floats;
  const bool gated = c.gate.columns != nullptr;
  const ptrdiff_t n = imin(p.chunk, c.up.n - f0), columns = div_up(n, kLanes);
  columns_product(c.up, up, gated ? &c.gate : nullptr, gate, p.ldc, f0 / kLanes, columns, p, p.x, own);
  const ptrdiff_t written = columns * kLanes;
  bool finite = true;
  const ptrdiff_t groups = p.m.groups();
  for (ptrdiff_t g = 0, t0 = 0, t1; g < groups; ++g, t0 = t1) {
    t1 = p.m.begin(g + 1, groups);
    const ptrdiff_t first = t0 * p.ldc, T = t1 - t0;
    if (g + 1 < groups) ask_to_put(p.m, t1, p.m.begin(g + 2, groups) - t1, f0, n);
    float* const rows = (gated ? gate : up) + first;
#ifdef FANFOLD_AMX
    if (p.m.mode == kRowMode && n == written) {
      coefficients(c, gated, gate + first, up + first, p.ldc, T, n, (Narrow*)(p.m.b + t0 * p.m.ld + f0), p.m.ld);
      continue;
    }
#endif
    coefficients(c, gated, gate + first, up + first, p.ldc, T, written, rows, p.ldc);
    // beyond n act(0) need not be 0, and a group is quantized whole
    for (ptrdiff_t t = 0; t < T && n < imax(written, p.chunk); ++t) {
      __builtin_memset(rows + t * p.ldc + n, 0, (size_t)(imax(written, p.chunk) - n) * sizeof(float));
    }
    finite &= put_group(c.down, p.m, t0, T, f0, n, written, rows, p.ldc);
  }
  return finite;
}

template <class YT>
INL void put_row(YT* to, const float* from, ptrdiff_t n) {
  ptrdiff_t i = 0;
  for (; i + W <= n; i += W) put(to + i, load(from + i));
  for (; i < n; ++i) put(to + i, from[i]);
}

// A product whose outputs leave the call.
struct Last {
  const Packed* matrix;
  void* y;
  ptrdiff_t y_stride, column;
};

INL ptrdiff_t down_tasks(const Packed& m, const Plan& p) { return div_up(m.n, p.down_columns * kLanes); }

// The columns of task i of down and of the matrices beside it; a matrix of nullptr behind the last.
INL Last last_of(const PackedCall& c, const Plan& p, ptrdiff_t i) {
  const ptrdiff_t tasks = down_tasks(c.down, p);
  if (i < tasks) return {&c.down, c.y, c.y_stride, i * p.down_columns};
  i -= tasks;
  for (int b = 0; b < c.n_beside; ++b) {
    const Beside& beside = c.beside[b];
    const ptrdiff_t more = down_tasks(beside.matrix, p);
    if (i < more) return {&beside.matrix, beside.y, beside.y_stride, i * p.down_columns};
    i -= more;
  }
  return {nullptr, nullptr, 0, 0};
}

// Whether n outputs' sums are as well kept in y itself: whole lines of it, not all rows' in the same cache sets, and
// tiles that end with the tokens.
INL bool sums_may_lie_in_y(const PackedCall& c, const Inputs& in, const Last& last, ptrdiff_t n) {
  if (c.y_dtype != kFloat32 || n % (kAlwaysPairs ? 2 * kLanes : kLanes) != 0 || is_by_rows(in.mode)) return false;
  return (uintptr_t)last.y % 64 == 0 && last.y_stride % 16 == 0 && last.y_stride % 1024 != 0;
}

static void down_task(const PackedCall& c, const Plan& p, const Inputs& in, ptrdiff_t first, const Last& last,
                      uint8_t* own) {
  float* const out = (float*)(own + kScratchBytes);
  const Packed& m = *last.matrix;
  const ptrdiff_t columns = imin(p.down_columns, div_up(m.n, kLanes) - last.column), n0 = last.column * kLanes;
  const ptrdiff_t n = imin(columns * kLanes, m.n - n0);
  if (sums_may_lie_in_y(c, in, last, n)) {
    float* const y = (float*)last.y + first * last.y_stride + n0;
    return columns_product(m, y, nullptr, nullptr, last.y_stride, last.column, columns, p, in, own);
  }
  columns_product(m, out, nullptr, nullptr, p.ldc, last.column, columns, p, in, own);
  for (ptrdiff_t t = 0; t < in.tokens; ++t) {
    const ptrdiff_t at = (first + t) * last.y_stride + n0;
    if (c.y_dtype == kFloat32) {
      put_row((float*)last.y + at, out + t * p.ldc, n);
    } else {
      put_row((uint16_t*)last.y + at, out + t * p.ldc, n);
    }
  }
}

void packed_body(int thread, int threads, void* arg) {
  PackedJob& job = *(PackedJob*)arg;
  const PackedCall& c = *job.call;
  Plan p = plan(c, (uintptr_t)job.workspace);
  const bool whole = c.up.columns != nullptr;
  uint8_t* const own = job.workspace + p.shared + p.each * (size_t)thread;
  const TileUnit unit(is_by_rows(p.x.mode) || is_by_rows(p.m.mode));
  bool finite = true;
  for (ptrdiff_t first = 0; first < c.tokens; first += p.block) {
    p.x.tokens = p.m.tokens = imin(p.block, c.tokens - first);
    const ptrdiff_t tasks = input_tasks(first_matrix(c), p.x);
    for (ptrdiff_t i; (i = take(job.next[0])) < tasks;) finite &= take_inputs(c, first_matrix(c), p.x, first, i);
    if (thread == 0) zero_rows(p.x, first_matrix(c).k);
    finish(job, 0, thread, threads);
    if (whole) {
      if (thread == 0) {
        __atomic_store_n(&job.next[2], 0, __ATOMIC_RELAXED);
        zero_rows(p.m, c.down.k);
      }
      for (ptrdiff_t i; (i = take(job.next[1])) * p.chunk < c.up.n;) finite &= up_task(c, p, i * p.chunk, own);
      finish(job, 1, thread, threads);
    }
    Inputs in = whole ? p.m : p.x;
    if (may_be_sparse(c) && in.mode == kFloatMode) in = without_zeros(c.down, in, (int32_t*)(own + p.lists));
    for (Last last; (last = last_of(c, p, take(job.next[2]))).matrix != nullptr;) down_task(c, p, in, first, last, own);
    // Of a whole FFN the next block's inputs may be made ready while others still multiply the coefficients.
    if (!whole && first + p.block < c.tokens) finish(job, 2, thread, threads);
  }
  if (!finite) __atomic_store_n(&job.odd, 1, __ATOMIC_RELAXED);
}

size_t packed_workspace(const PackedCall& c) {
  const Plan p = plan(c, 0);
  return p.shared + p.each * (size_t)c.threads;
}

bool packed_run(const PackedCall& c, uint8_t* workspace) {
  PackedJob job = {&c, workspace, {0, 0, 0}, 0};
  parallel(c.threads, packed_body, &job);
  return job.odd == 0;
}

static Arithmetic products(const Packed& m, bool narrow_x, ptrdiff_t tokens) {
  const Mode mode = mode_of(m, narrow_x, tokens);
  return is_quantized(mode) ? kInt8Arithmetic : mode == kFloatMode ? kFloatArithmetic : kBf16Arithmetic;
}
