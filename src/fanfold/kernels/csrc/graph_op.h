// The operator that compiled graphs call, fanfold::packed_run, in C through PyTorch's stable interface.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

// Registers it: fanfold/kernels/graph_op.py says when.  functions  {name: address} of PyTorch's C functions, those of
// `graph_op_needs`.  otherwise  ([x, *parts], description) -> y, as capsules of handles: computes what was not
// remembered.
void register_graph_op(const std::map<std::string, uintptr_t>& functions, const nanobind::callable& otherwise);

std::vector<std::string> graph_op_needs();

// Has further calls like one be made without Python.  kernels  one, or products of one x, each with its outputs;
// together  whether one pass may compute them.  parts  (address, elements) of the matrices, then of the biases.
void remember_graph_op(const std::string& description, int x_dtype, int64_t inputs, const nanobind::list& kernels,
                       const std::vector<int64_t>& outputs, bool together, size_t matrices,
                       const std::vector<std::tuple<uintptr_t, int64_t>>& parts);

void forget_graph_op();

// How many calls were made that way.
uint64_t graph_op_calls();

// `is_written` says whether the 8 bytes at `place` have become something else than `word`; a call in C is made only of
// matrices of which it would not. The place stays readable for good.
void watch_matrix(uintptr_t matrix, uintptr_t place, int64_t word);
void unwatch_matrix(uintptr_t matrix, uintptr_t place);
bool is_written(uintptr_t matrix);
