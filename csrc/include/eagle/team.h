// A team: the threads that work on one request. A kernel body is written once, for a team of any size:
//
//     for (int i = team.rank(); i < n; i += team.size()) { ... }
//     team.sync();  // every member now sees what the loop wrote
//
// On the CPU a team is one thread (SerialTeam, whose calls compile to nothing), on the GPU one block (BlockTeam in
// csrc/cuda/block_team.cuh). Both have
//
//     rank(), size()    this member, 0 .. size - 1
//     sync()            a barrier, for memory too
//     sum(x)            of int32_t, uint32_t, int64_t, uint64_t over all members
//     exclusive_sum(x)  of the members of lower rank; the same types
//     max(x), min(x)    of float and of those types
//     add(p, x)         atomic *p += x, returns the old value; uint32_t and uint64_t
//     accumulate(p, x)  the same for a sum of uint64_t where many members meet; to be read after a barrier
//
// kTake is how many neighbouring items a member should take at once: many for a single thread, so that the compiler
// uses vectors; one in a block, where neighbouring threads read neighbouring items.
//
// sum, exclusive_sum, max and min are barriers too: every member must call them, and every member gets the result. Only
// integers are summed. An integer sum does not depend on its order, so a body gives the same bits at any team size.
#pragma once
#include "portable.h"

namespace eagle {

struct SerialTeam {
  static constexpr int kTake = 64;

  int rank() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  template <class T>
  T sum(T x) const {
    return x;
  }
  template <class T>
  T exclusive_sum(T) const {
    return 0;
  }
  template <class T>
  T max(T x) const {
    return x;
  }
  template <class T>
  T min(T x) const {
    return x;
  }
  template <class T>
  T add(T* p, T x) const {
    const T before = *p;
    *p += x;
    return before;
  }
  void accumulate(uint64_t* p, uint64_t x) const { *p += x; }
};

}  // namespace eagle
