// What the linear layers with bfloat16 weights share.
//
// x [rows, K] bfloat16, rows may have a stride; weight [N, K], bias [N] or [0], out [rows, N], all bfloat16.
#pragma once
#include <bindings/checks.h>

#include <algorithm>
#include <vector>

#include "parallel.h"

namespace eagle {

constexpr int64_t kBf16Block = 16;             // outputs of a block, whose weights stay in the cache for all rows
constexpr int64_t kBf16Chunk = 2;              // blocks of one task
constexpr int64_t kBf16MinParallel = 1 << 17;  // weights; below, waking other threads costs more than it saves

template <class T>
struct Bf16Layer {
  // The rows in groups of at most kRows, each [steps, rows of the group, Step] in the form that the products read,
  // zeros after the last input and row. In this order a group is read from the first byte to the last; rows 4,096 bytes
  // apart would share a line of the cache.
  const T* x;
  const uint16_t* weight;  // [outputs, inputs]
  const uint16_t* bias;    // [outputs] or null
  uint16_t* out;           // [rows, outputs]
  int64_t rows, inputs, outputs, steps;
};

// Raises what is wrong with the arguments; x of the result is null. step: inputs of a step.
template <class T>
Bf16Layer<T> check_bf16_linear(TensorView x, TensorView weight, TensorView bias, TensorView out, int64_t step) {
  check_rows(x, "x", kBF16, {kAny, kAny});
  const int64_t rows = x.size(0), inputs = x.size(1);
  check(weight, "weight", kBF16, {kAny, inputs});
  const int64_t outputs = weight.size(0);
  check(bias, "bias", kBF16, {bias.numel() ? outputs : 0});
  check(out, "out", kBF16, {rows, outputs});
  const uint16_t* biases = bias.numel() ? ptr<uint16_t>(bias) : nullptr;
  return {nullptr, ptr<uint16_t>(weight),     biases, ptr<uint16_t>(out), rows, inputs,
          outputs, (inputs + step - 1) / step};
}

// Calls f(row, size of the group) for every group of rows. A size is a power of two, so that the last group may have
// more rows than are left.
template <int64_t MaxRows, class F>
void for_groups(int64_t rows, F&& f) {
  for (int64_t row = 0; row < rows; row += MaxRows) {
    int64_t size = 1;
    while (size < rows - row && size < MaxRows) size *= 2;
    f(row, size);
  }
}

// Brings the rows of x, `input_stride` elements apart, into the order of Bf16Layer::x. copy(from, count, to) writes
// Step elements: `count` inputs, then zeros.
template <int64_t MaxRows, int64_t Step, class T, class Copy>
void group_rows(const uint16_t* x, int64_t input_stride, const Bf16Layer<T>& layer, T* grouped, Copy&& copy) {
  for_groups<MaxRows>(layer.rows, [&](int64_t row, int64_t size) {
    T* to = grouped + row * layer.steps * Step;
    for (int64_t step = 0; step < layer.steps; ++step) {
      const int64_t first = step * Step, count = std::min(Step, layer.inputs - first);
      for (int64_t r = row; r < row + size; ++r, to += Step) {
        r < layer.rows ? copy(x + r * input_stride + first, count, to) : copy(x, 0, to);
      }
    }
  });
}

// Calls f(row, rows of the group, output, end) for every group of rows and block of outputs, on all threads.
template <int64_t MaxRows, class T, class F>
void for_blocks(const Bf16Layer<T>& layer, F&& f) {
  constexpr int64_t kTask = kBf16Chunk * kBf16Block;
  const int64_t tasks = (layer.outputs + kTask - 1) / kTask;
  parallel_for(tasks, layer.outputs * layer.inputs >= kBf16MinParallel, [&](int64_t task) {
    const int64_t last = std::min(layer.outputs, (task + 1) * kTask);
    for (int64_t output = task * kTask; output < last; output += kBf16Block) {
      const int64_t end = std::min(last, output + kBf16Block);
      for_groups<MaxRows>(layer.rows, [&](int64_t row, int64_t rows) { f(row, rows, output, end); });
    }
  });
}

}  // namespace eagle
