#define FANFOLD_NS packed_avx512bf16
#define FANFOLD_TABLE kPackedAvx512Bf16
#define FANFOLD_W 16
#define FANFOLD_VNNI
#define FANFOLD_BF16

#include "packed_isa.h"
