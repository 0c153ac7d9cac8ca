// One call of a swapped module whose checks have been prepared: fanfold/models/quick.py, which documents the plan.
#pragma once

#include <nanobind/nanobind.h>

// y, or None if x or the surroundings are not of the kind that was prepared for, or False if what the plan relies on is
// no longer there, or True if PyTorch's own operations are the better choice.
nanobind::object attempt(const nanobind::tuple& plan, nanobind::handle x);
