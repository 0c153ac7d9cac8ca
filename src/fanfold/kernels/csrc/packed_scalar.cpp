#define FANFOLD_NS packed_scalar
#define FANFOLD_TABLE kPackedScalar
#define FANFOLD_W 4

#include "packed_isa.h"
