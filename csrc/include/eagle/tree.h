// Growth and selection of the draft tree for one request. The specification is eagle_plugin/core/tree.py.
#pragma once
#include "portable.h"

namespace eagle {

// A list of at most `capacity` items, best score first. Items arrive by ascending index, so that a strict comparison
// keeps equal scores in index order. Returns the new length.
EAGLE_HD int insert_best(float* scores, int32_t* items, int length, int capacity, float score, int32_t item) {
  if (length == capacity) {
    if (capacity == 0 || !(score > scores[length - 1])) return length;
    --length;
  }
  int place = length;
  for (; place > 0 && score > scores[place - 1]; --place) {
    scores[place] = scores[place - 1];
    items[place] = items[place - 1];
  }
  scores[place] = score;
  items[place] = item;
  return length + 1;
}

struct TableRow {  // one request's row of the candidate table
  float* scores;
  int64_t* tokens;
  int32_t* parents;
};

struct FrontierRow {  // one request's row of the frontier
  int32_t* candidates;
  float* scores;
  int64_t* tokens;
  int64_t* parent_rows;
  uint64_t* ancestors;
};

// The children of `rows` frontier nodes (k each) enter the table at `offset`; the best `keep` of them are the frontier.
// `previous` is null at level 1. first_slot + keep <= 64 and offset + rows * k <= C are the caller's to check.
EAGLE_HD void grow_level(TableRow table, int32_t offset, int32_t rows, int32_t k, const float* logp,
                         const int64_t* tokens, const FrontierRow* previous, int32_t first_slot, int32_t keep,
                         FrontierRow out) {
  int length = 0;
  for (int32_t row = 0; row < rows; ++row) {
    const float base = previous ? previous->scores[row] : 0.0f;
    const int32_t parent = previous ? previous->candidates[row] : -1;
    for (int32_t child = row * k; child < (row + 1) * k; ++child) {
      const float score = previous ? base + logp[child] : logp[child];
      table.scores[offset + child] = score;
      table.tokens[offset + child] = tokens[child];
      table.parents[offset + child] = parent;
      length = insert_best(out.scores, out.candidates, length, keep, score, child);
    }
  }
  for (int32_t j = 0; j < keep; ++j) {
    const int32_t child = out.candidates[j];
    const int32_t row = child / k;
    out.candidates[j] = offset + child;
    out.tokens[j] = tokens[child];
    out.parent_rows[j] = row;
    out.ancestors[j] = (uint64_t{1} << (first_slot + j)) | (previous ? previous->ancestors[row] : 0);
  }
}

struct TreeRow {  // one request's row of the draft tree
  int64_t* tokens;
  int32_t* parents;
  int32_t* depths;
  uint64_t* ancestors;
};

// The best width - 1 of `candidates` candidates as a tree. Returns false when a picked candidate's parent is not picked
// or stands behind it, which means that the table is corrupt: the row of `out` is then incomplete, nothing else is
// touched.
EAGLE_HD bool select_tree(TableRow table, int32_t candidates, int64_t root_token, int32_t width, TreeRow out) {
  float scores[kMaxWidth];
  int32_t picked[kMaxWidth];
  int length = 0;
  const int capacity = width - 1 < candidates ? width - 1 : candidates;
  for (int32_t c = 0; c < candidates; ++c) {
    length = insert_best(scores, picked, length, capacity, table.scores[c], c);
  }
  for (int i = 1; i < length; ++i) {  // table order: parents before children
    const int32_t c = picked[i];
    int place = i;
    for (; place > 0 && picked[place - 1] > c; --place) picked[place] = picked[place - 1];
    picked[place] = c;
  }
  out.tokens[0] = root_token;
  out.parents[0] = -1;
  out.depths[0] = 0;
  out.ancestors[0] = 1;
  for (int node = 1; node <= length; ++node) {
    const int32_t c = picked[node - 1];
    const int32_t parent_candidate = table.parents[c];
    int parent = 0;
    if (parent_candidate >= 0) {
      int low = 0, high = node - 1;  // first place in picked[0, node - 1) that is not below the parent
      while (low < high) {
        const int middle = (low + high) / 2;
        if (picked[middle] < parent_candidate) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      if (low == node - 1 || picked[low] != parent_candidate) return false;
      parent = low + 1;
    }
    out.tokens[node] = table.tokens[c];
    out.parents[node] = parent;
    out.depths[node] = out.depths[parent] + 1;
    out.ancestors[node] = out.ancestors[parent] | (uint64_t{1} << node);
  }
  for (int node = length + 1; node < width; ++node) {
    out.tokens[node] = root_token;
    out.parents[node] = -1;
    out.depths[node] = 0;
    out.ancestors[node] = 1 | (uint64_t{1} << node);
  }
  return true;
}

}  // namespace eagle
