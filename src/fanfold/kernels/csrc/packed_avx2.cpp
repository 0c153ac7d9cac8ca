#define FANFOLD_NS packed_avx2
#define FANFOLD_TABLE kPackedAvx2
#define FANFOLD_W 8

#include "packed_isa.h"
