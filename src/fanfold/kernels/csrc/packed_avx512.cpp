#define FANFOLD_NS packed_avx512
#define FANFOLD_TABLE kPackedAvx512
#define FANFOLD_W 16

#include "packed_isa.h"
