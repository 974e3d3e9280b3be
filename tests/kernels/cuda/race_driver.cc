// Calls the emulated kernels on small inputs that reach every barrier; ThreadSanitizer watches. The kernels are linked
// in and called by the names that they export.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <cstdio>
#include <vector>

template <class T>
constexpr DLDataType dtype_of() {
  return {std::is_floating_point_v<T> ? kDLFloat : kDLInt, 8 * sizeof(T), 1};
}

template <class T>
class Tensor {
 public:
  explicit Tensor(std::vector<int64_t> shape) : shape_(std::move(shape)), strides_(shape_.size()) {
    int64_t size = 1;
    for (size_t axis = shape_.size(); axis-- > 0; size *= shape_[axis]) strides_[axis] = size;
    values.resize(size);
    view_ = {values.data(),
             {kDLCPU, 0},
             static_cast<int32_t>(shape_.size()),
             dtype_of<T>(),
             shape_.data(),
             strides_.data(),
             0};
  }
  Tensor(std::vector<int64_t> shape, int64_t modulus) : Tensor(std::move(shape)) {  // some values, with ties
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<T>(i * 7919 % modulus);
  }
  DLTensor* view() { return &view_; }
  tvm::ffi::Tensor shared() {  // as an array of tensors takes it; the values stay here
    managed_ = {view_, nullptr, [](DLManagedTensor*) {}};
    return tvm::ffi::Tensor::FromDLPack(&managed_);
  }

  std::vector<T> values;

 private:
  std::vector<int64_t> shape_, strides_;
  DLTensor view_;
  DLManagedTensor managed_;
};

using Parameters = tvm::ffi::Array<tvm::ffi::Tensor>;

template <class T>
DLTensor* argument(Tensor<T>& tensor) {
  return tensor.view();
}
template <class T>
T argument(T value) {
  return value;
}

#define KERNEL(name)                                                                             \
  extern "C" int __tvm_ffi_##name(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);                 \
  template <class... Arguments>                                                                  \
  void name(Arguments&&... arguments) {                                                          \
    tvm::ffi::Function::FromExternC(nullptr, __tvm_ffi_##name, nullptr)(argument(arguments)...); \
  }
KERNEL(topk_log_softmax)
KERNEL(grow_level)
KERNEL(grow_levels)
KERNEL(select_tree)
KERNEL(compact_kv)
KERNEL(store_kv)
KERNEL(sibling_links)
KERNEL(uniforms)
KERNEL(propose)
KERNEL(verify_tree)
KERNEL(penalize_nodes)
KERNEL(count_tokens)
KERNEL(start_round)

void grow_and_walk() {
  const int64_t b = 2, k = 8, topk = 8, width = 64, vocabulary = 5000;
  Tensor<float> logits({b, vocabulary}, 50), logp({b, 1, k}), level_logp({b, topk, k}, 5);
  Tensor<float> flat_logp({b, k});
  Tensor<int64_t> index({b, k}), ids({b, 1, k}, 100), level_ids({b, topk, k}, 100);
  topk_log_softmax(logits, flat_logp, index);
  logp.values = flat_logp.values;
  for (float& x : level_logp.values) x = -x;

  const int64_t candidates = k + topk * k;
  Tensor<float> table_scores({b, candidates}), scores({b, topk});
  Tensor<int64_t> table_ids({b, candidates}), frontier_ids({b, topk}), rows({b, topk}), ancestors({b, topk});
  Tensor<int32_t> table_parents({b, candidates}), frontier({b, topk});
  grow_level(table_scores, table_ids, table_parents, 0, 1, logp, ids, nullptr, nullptr, nullptr, topk, frontier, scores,
             frontier_ids, rows, ancestors);
  Tensor<float> next_scores({b, topk});
  Tensor<int64_t> next_ids({b, topk}), next_rows({b, topk}), next_ancestors({b, topk});
  Tensor<int32_t> next({b, topk});
  grow_level(table_scores, table_ids, table_parents, k, 2, level_logp, level_ids, frontier, scores, ancestors, topk,
             next, next_scores, next_ids, next_rows, next_ancestors);

  Tensor<float> all_logp({b, 1 + 2 * topk, k}, 5), all_scores({b, (1 + 2 * topk) * k});
  Tensor<int64_t> all_ids({b, 1 + 2 * topk, k}, 100), all_tokens({b, (1 + 2 * topk) * k});
  Tensor<int32_t> all_parents({b, (1 + 2 * topk) * k});
  for (float& x : all_logp.values) x = -x;
  grow_levels(all_scores, all_tokens, all_parents, 3, topk, all_logp, all_ids);

  Tensor<int64_t> roots({b}), tree_ids({b, width}), tree_ancestors({b, width});
  Tensor<int32_t> parents({b, width}), depths({b, width});
  select_tree(table_scores, table_ids, table_parents, roots, tree_ids, parents, depths, tree_ancestors);

  Tensor<int32_t> accepted({b, 4}), lengths({b});
  Tensor<float> cache({b * width, 3, 5}, 1000), more({4, 3, 5}, 10);
  Tensor<int64_t> address({1}), bytes({1}), window({b, width}), loc({4});
  address.values[0] = reinterpret_cast<int64_t>(cache.values.data());
  bytes.values[0] = 3 * 5 * sizeof(float);
  for (int64_t i = 0; i < b * width; ++i) window.values[i] = i;
  lengths.values = {3, 3};
  accepted.values = {0, 2, 3, -1, 0, 1, 9, -1};
  compact_kv(address, bytes, window, accepted, lengths, b * width);
  for (int64_t i = 0; i < 4; ++i) loc.values[i] = 5 * i;
  store_kv(cache, cache, loc, more, more);

  Tensor<int64_t> first_child({b, width}), next_sibling({b, width});
  sibling_links(parents, first_child, next_sibling);
}

// Two requests whose nodes have 5 children. The filters of one request cut its distribution
// between tokens with the same logit.
void sample() {
  const int64_t b = 2, k = 5, top_m = 8, width = 6, max_accept_length = 3, vocabulary = 3000;
  Tensor<float> temperatures({b}), top_ps({b}), min_ps({b});
  Tensor<int32_t> top_ks({b});
  temperatures.values = {1, 0.5};
  top_ps.values = {0.9f, 1};
  min_ps.values = {0, 0.1f};
  top_ks.values = {100, 1000};
  const Parameters params{temperatures.shared(), top_ks.shared(), top_ps.shared(), min_ps.shared()};
  Tensor<int64_t> rng_keys({b}, 3), counters({b}, 3);
  Tensor<double> drawn({b, 5});
  uniforms(rng_keys, counters, 1, drawn);

  Tensor<float> draft({b, vocabulary}, 20), logp({b, top_m}), child_logp({b, k});
  Tensor<int64_t> index({b, top_m}), child_tokens({b, k});
  topk_log_softmax(draft, logp, index);
  propose(logp, index, params, rng_keys, counters, nullptr, 1.2, child_logp, child_tokens);

  Tensor<float> target({b * width, vocabulary}, 20);
  Tensor<int64_t> tokens({b, width}), out({b, max_accept_length}), workspace({b * width, 7383});
  Tensor<int32_t> parents({b, width}), accepted({b, max_accept_length}), lengths({b});
  for (int64_t i = 0; i < b * width; ++i) {
    const int64_t node = i % width;
    tokens.values[i] = child_tokens.values[i / width * k + node % k];
    parents.values[i] = node < 5 ? static_cast<int32_t>(node > 0) - 1 : 1;
  }
  for (const bool chained : {false, true}) {
    verify_tree(tokens, parents, target, params, rng_keys, counters, chained, workspace, accepted, lengths, out);
  }
}

// Counted tokens in two tiles, tokens on the paths that are counted or not, and stop tokens.
void penalize() {
  const int64_t b = 2, width = 6, rows = 3, vocabulary = 2100;
  Tensor<float> logits({b * width, vocabulary}, 20), strengths({rows}, 3);
  Tensor<int64_t> tokens({b, width}, 5), ancestors({b, width}), places({b}), lengths({b}), stops({rows, 2}, 7);
  Tensor<int64_t> min_lens({rows}), yielded({b, 3}, 2);
  Tensor<int32_t> depths({b, width}), counts({rows, vocabulary}, 3), accept_lengths({b});
  for (int64_t i = 0; i < b * width; ++i) {
    ancestors.values[i] = (int64_t{2} << i % width) - 1;
    depths.values[i] = static_cast<int32_t>(i % width);
  }
  strengths.values = {1, 2, 3};
  places.values = {2, 2};
  min_lens.values = {9, 9, 9};
  accept_lengths.values = {3, 2};
  penalize_nodes(logits, tokens, ancestors, depths, places, lengths, counts, strengths, strengths, strengths, stops,
                 min_lens);
  count_tokens(counts, places, yielded, accept_lengths);
}

void start() {
  const int64_t b = 2, padded = 3, reach = 4, rows = 3, context = 5000;
  Tensor<int64_t> lengths({b}), places({b}), rng_keys({rows}, 7), prefix_lens({padded}), requests({padded}),
      out_rng_keys({padded}), slots({padded, reach});
  Tensor<int32_t> req_to_token({rows, context}, 97), table({padded, context}), top_ks({b}, 9), out_top_ks({padded});
  Tensor<float> x({b}, 9), temperatures({padded}), top_ps({padded}), min_ps({padded});
  lengths.values = {4500, 10};
  places.values = {1, 2};
  start_round(lengths, places, req_to_token, rng_keys, Parameters{x.shared(), top_ks.shared(), x.shared(), x.shared()},
              prefix_lens, requests, out_rng_keys, slots, table,
              Parameters{temperatures.shared(), out_top_ks.shared(), top_ps.shared(), min_ps.shared()});
}

int main() {
  grow_and_walk();
  sample();
  penalize();
  start();
  std::puts("finished");
}
