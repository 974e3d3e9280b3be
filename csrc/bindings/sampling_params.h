// The sampling parameters of requests as kernels take them: an array of tensors [rows] in the order of the fields of
// SamplingParams in eagle_plugin/core/sampling.py. A new filter is a member here and in SamplingRow.
#pragma once
#include <eagle/weights.h>
#include <tvm/ffi/container/array.h>

#include "checks.h"

namespace eagle {
using tvm::ffi::Array;
using tvm::ffi::Tensor;

struct SamplingTable {
  float* temperatures;
  int32_t* top_ks;
  float *top_ps, *min_ps;

  EAGLE_HD SamplingRow row(int64_t i) const { return {temperatures[i], top_ks[i], top_ps[i], min_ps[i]}; }
  EAGLE_HD void set_row(int64_t i, const SamplingRow& row) const {
    temperatures[i] = row.temperature;
    top_ks[i] = row.top_k;
    top_ps[i] = row.top_p;
    min_ps[i] = row.min_p;
  }
};

EAGLE_HD SamplingRow greedy_row() { return {1.0f, 1, 1.0f, 0.0f}; }

namespace bindings {

inline SamplingTable check_sampling(const Array<Tensor>& given, const std::string& name, int64_t rows) {
  constexpr int kFields = 4;
  if (given.size() != kFields) {
    TVM_FFI_THROW(ValueError) << name << " has " << given.size() << " tensors, wanted " << kFields
                              << ": pass the fields of SamplingParams";
  }
  int field = 0;
  const auto next = [&](const char* suffix, DLDataType dtype) {
    const Tensor t = given[field++];
    check(t, (name + suffix).c_str(), dtype, {rows});
    return TensorView(t);
  };
  const TensorView temperatures = next(".temperatures", kF32), top_ks = next(".top_ks", kI32);
  const TensorView top_ps = next(".top_ps", kF32), min_ps = next(".min_ps", kF32);
  return {ptr<float>(temperatures), ptr<int32_t>(top_ks), ptr<float>(top_ps), ptr<float>(min_ps)};
}

// The same for parameters that a kernel samples by.
inline SamplingTable check_params(const Array<Tensor>& given, int64_t rows) {
  const SamplingTable table = check_sampling(given, "params", rows);
  for (int64_t i = 0; kChecksValues && i < rows; ++i) {
    if (!(table.temperatures[i] > 0)) {
      TVM_FFI_THROW(ValueError) << "params.temperatures[" << i << "] is " << table.temperatures[i]
                                << ", wanted above 0: greedy is top_k 1 with temperature 1";
    }
    if (table.top_ks[i] < 1) {
      TVM_FFI_THROW(ValueError) << "params.top_ks[" << i << "] is " << table.top_ks[i]
                                << ", wanted at least 1: the vocabulary size is off";
    }
  }
  return table;
}

}  // namespace bindings
}  // namespace eagle
