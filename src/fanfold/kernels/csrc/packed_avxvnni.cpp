#define FANFOLD_NS packed_avxvnni
#define FANFOLD_TABLE kPackedAvxVnni
#define FANFOLD_W 8
#define FANFOLD_VNNI

#include "packed_isa.h"
