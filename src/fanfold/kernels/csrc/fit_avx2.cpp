#define FANFOLD_NS fit_avx2
#define FANFOLD_TABLE kFitAvx2
#define FANFOLD_W 8

#include "fit_inl.h"
