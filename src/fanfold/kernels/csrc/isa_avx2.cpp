// 16 registers of 8 floats: 12 accumulators, 2 inputs, 1 weight.
#define FANFOLD_NS isa_avx2
#define FANFOLD_TABLE kKernelsAvx2
#define FANFOLD_W 8
#define FANFOLD_MR 6

#include "ffn_inl.h"
