// The baseline of whatever CPU the build is for: 16-byte vectors, which every 64-bit CPU has.
#define FANFOLD_NS isa_scalar
#define FANFOLD_TABLE kKernelsScalar
#define FANFOLD_W 4
#define FANFOLD_MR 6

#include "ffn_inl.h"
