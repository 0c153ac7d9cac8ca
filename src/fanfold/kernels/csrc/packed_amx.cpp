#define FANFOLD_NS packed_amx
#define FANFOLD_TABLE kPackedAmx
#define FANFOLD_W 16
#define FANFOLD_VNNI
#define FANFOLD_BF16
#define FANFOLD_AMX

#include "packed_isa.h"
