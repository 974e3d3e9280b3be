// Draft trees as first-child / next-sibling links, the form of SGLang's EAGLE worker; see ../tree_links.py.
#include <bindings/checks.h>

#include <algorithm>
#include <vector>

namespace eagle {
namespace {

struct Links {
  int64_t *index, *first, *next;
};

// An empty tensor is contiguous whatever its strides, which differ by how it was made.
void check_rows_or_none(const TensorView& t, const char* name, std::initializer_list<int64_t> shape) {
  check_dtype(t, name, kI64);
  check_shape(t, name, shape);
  if (t.numel() > 0) check(t, name, kI64, shape);
}

// parents[node] for node = 1..width-1: 0 for children of the root, -1 where the parent was not chosen.
void find_parents(const int64_t* parent_list, int64_t groups, const int64_t* selected, int64_t width, int64_t topk,
                  int32_t* parents) {
  parents[0] = -1;
  for (int64_t node = 1; node < width; ++node) {
    const int64_t group = selected[node - 1] / topk;
    parents[node] = group == 0 ? 0 : -1;
    if (group <= 0 || group >= groups) continue;
    for (int64_t other = 1; other < width; ++other) {
      if (selected[other - 1] == parent_list[group]) {
        parents[node] = static_cast<int32_t>(other);
        break;
      }
    }
  }
}

void link_one(const int32_t* parents, int64_t width, int64_t depth, int64_t seq_len, int64_t base, bool* mask,
              int64_t* positions, Links links) {
  for (int64_t node = 0; node < width; ++node) links.index[node] = base + node;
  std::fill(links.first, links.first + width, -1);
  std::fill(links.next, links.next + width, -1);
  for (int64_t node = width - 1; node > 0; --node) {  // downwards: each child goes to the front of its parent's list
    const int32_t parent = parents[node];
    if (parent < 0) continue;
    links.next[node] = links.first[parent];
    links.first[parent] = node;
  }
  for (int64_t node = 0; node < width; ++node) {
    bool* row = mask + node * width;
    std::fill(row, row + width, false);
    row[0] = true;
    int64_t steps = 0;
    for (int64_t at = node; at > 0 && steps < depth; at = parents[at], ++steps) row[at] = true;
    positions[node] = seq_len + steps;
  }
}

}  // namespace

void link_tree_cpu(TensorView parent_list, TensorView selected, TensorView seq_lens, TensorView mask,
                   TensorView positions, TensorView node_index, TensorView first_child, TensorView next_sibling,
                   int64_t topk, int64_t depth) {
  check(node_index, "node_index", kI64, {kAny, kAny});
  const int64_t b = node_index.size(0), width = node_index.size(1);
  if (width < 1) TVM_FFI_THROW(ValueError) << "tree width is 0, wanted at least 1: the root needs a place";
  if (topk < 1 || depth < 1) {
    TVM_FFI_THROW(ValueError) << "topk is " << topk << " and depth " << depth << ", wanted at least 1: raise them";
  }
  check_rows_or_none(parent_list, "parent_list", {b, kAny});
  check_rows_or_none(selected, "selected", {b, width - 1});
  check(seq_lens, "seq_lens", kI64, {b});
  check(mask, "mask", kBool, {b * width * width});
  check(positions, "positions", kI64, {b * width});
  check(first_child, "first_child", kI64, {b, width});
  check(next_sibling, "next_sibling", kI64, {b, width});
  const int64_t groups = parent_list.size(1);
  std::vector<int32_t> parents(static_cast<size_t>(width));
  for (int64_t i = 0; i < b; ++i) {
    find_parents(ptr<int64_t>(parent_list) + i * groups, groups, ptr<int64_t>(selected) + i * (width - 1), width, topk,
                 parents.data());
    link_one(parents.data(), width, depth, ptr<int64_t>(seq_lens)[i], i * width, ptr<bool>(mask) + i * width * width,
             ptr<int64_t>(positions) + i * width,
             {ptr<int64_t>(node_index) + i * width, ptr<int64_t>(first_child) + i * width,
              ptr<int64_t>(next_sibling) + i * width});
  }
}

void walk_links_cpu(TensorView predicts, TensorView accept_index, TensorView accept_drafts, TensorView tokens,
                    TensorView node_index, TensorView first_child, TensorView next_sibling, TensorView targets) {
  check(tokens, "tokens", kI64, {kAny, kAny});
  const int64_t b = tokens.size(0), width = tokens.size(1);
  check(accept_index, "accept_index", kI32, {b, kAny});
  const int64_t stride = accept_index.size(1);
  if (width < 1) TVM_FFI_THROW(ValueError) << "tree width is 0, wanted at least 1: the root needs a place";
  if (stride < 1) TVM_FFI_THROW(ValueError) << "accept_index has 0 columns, wanted at least 1: the root needs a place";
  check(predicts, "predicts", kI32, {b * width});
  check(accept_drafts, "accept_drafts", kI32, {b});
  check(node_index, "node_index", kI64, {b, width});
  check(first_child, "first_child", kI64, {b, width});
  check(next_sibling, "next_sibling", kI64, {b, width});
  check(targets, "targets", kI64, {b, width});
  const int64_t* target = ptr<int64_t>(targets);
  for (int64_t i = 0; i < b; ++i) {
    const int64_t* token = ptr<int64_t>(tokens) + i * width;
    const int64_t* index = ptr<int64_t>(node_index) + i * width;
    const int64_t* first = ptr<int64_t>(first_child) + i * width;
    const int64_t* next = ptr<int64_t>(next_sibling) + i * width;
    int32_t* accepted = ptr<int32_t>(accept_index) + i * stride;
    const auto flat = [&](int64_t node) {
      const int64_t at = index[node];
      if (at < 0 || at >= b * width) {
        TVM_FFI_THROW(ValueError) << "node_index holds " << at << ", wanted 0 to " << b * width - 1
                                  << ": fill it with link_tree";
      }
      return at;
    };
    int64_t last = flat(0), node = 0, drafts = 0;
    accepted[0] = static_cast<int32_t>(last);
    while (drafts < stride - 1) {
      int64_t child = first[node], hops = 0;
      while (child >= 0 && child < width && token[child] != target[last] && hops++ < width) child = next[child];
      if (child < 0) break;
      if (child >= width || hops > width) {
        TVM_FFI_THROW(ValueError) << "the links of tree " << i << " leave the tree or run in a circle: fill them with "
                                  << "link_tree";
      }
      ptr<int32_t>(predicts)[last] = static_cast<int32_t>(target[last]);
      node = child;
      last = flat(node);
      accepted[++drafts] = static_cast<int32_t>(last);
    }
    ptr<int32_t>(accept_drafts)[i] = static_cast<int32_t>(drafts);
    ptr<int32_t>(predicts)[last] = static_cast<int32_t>(target[last]);
  }
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(link_tree, eagle::link_tree_cpu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(walk_links, eagle::walk_links_cpu);
