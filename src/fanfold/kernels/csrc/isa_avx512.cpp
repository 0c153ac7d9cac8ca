// 32 registers of 16 floats: 28 accumulators, 2 inputs, 1 weight.
#define FANFOLD_NS isa_avx512
#define FANFOLD_TABLE kKernelsAvx512
#define FANFOLD_W 16
#define FANFOLD_MR 14

#include "ffn_inl.h"
