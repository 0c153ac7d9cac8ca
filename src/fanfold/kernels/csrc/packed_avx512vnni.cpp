#define FANFOLD_NS packed_avx512vnni
#define FANFOLD_TABLE kPackedAvx512Vnni
#define FANFOLD_W 16
#define FANFOLD_VNNI

#include "packed_isa.h"
