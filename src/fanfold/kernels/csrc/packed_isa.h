// Packed kernels for one instruction set. A tiny .cpp file for each defines FANFOLD_NS (namespace), FANFOLD_TABLE (the
// exported PackedKernels), FANFOLD_W (floats in a vector), and FANFOLD_VNNI where the flags have it, and includes this
// file, compiled with its own flags. Headers used here must bring no inline code but intrinsics.

#include <cstddef>
#include <cstdint>
#include <utility>

#if FANFOLD_W >= 8
#include <immintrin.h>
#endif

#include "packed.h"
#include "parallel.h"

namespace fanfold {
namespace FANFOLD_NS {
namespace {

#include "vec_inl.h"
//
#include "act_inl.h"
//
#include "combine_inl.h"
//
#include "packed_inl.h"
//
#include "peak_inl.h"

}  // namespace
}  // namespace FANFOLD_NS

extern const PackedKernels FANFOLD_TABLE;
const PackedKernels FANFOLD_TABLE = {FANFOLD_NS::packed_workspace, FANFOLD_NS::packed_run, FANFOLD_NS::burn,
                                     FANFOLD_NS::products};

}  // namespace fanfold
