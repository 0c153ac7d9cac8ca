// Calls that have been made before, with as few looks at Python objects as will show what has changed.
#pragma once

#include <nanobind/nanobind.h>

// One call of a swapped module whose checks have been prepared: fanfold/models/quick.py documents the plan.
// y, or None if x or the surroundings are not of the kind that was prepared for, or False if what the plan relies on is
// no longer there, or True if PyTorch's own operations are the better choice.
nanobind::object attempt(const nanobind::tuple& plan, nanobind::handle x);

// One call of an operator whose kernel is bound: fanfold/kernels/packed_op.py documents `ready`. y, or None if it is
// not ready for these tensors.
nanobind::object repeat(const nanobind::dict& ready, nanobind::handle x, const nanobind::tuple& tensors,
                        nanobind::handle description);
