// 16-byte vectors: see isa_scalar.cpp.
#define FANFOLD_NS fit_scalar
#define FANFOLD_TABLE kFitScalar
#define FANFOLD_W 4

#include "fit_inl.h"
