#define FANFOLD_NS fit_avx512
#define FANFOLD_TABLE kFitAvx512
#define FANFOLD_W 16

#include "fit_inl.h"
