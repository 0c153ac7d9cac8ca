#include "fit.h"

#include "workspace.h"

namespace fanfold {

void fit(const FitKernels& isa, const Fit& given) {
  if (given.n < 1 || given.k < 1) return;
  Fit call = given;
  if (call.threads < 1) call.threads = 1;
  const Lease lease(isa.workspace(call) * static_cast<size_t>(call.threads) * sizeof(float));
  isa.run(call, static_cast<float*>(lease.data()));
}

}  // namespace fanfold
