// Norm, activation and rotary positions in one pass each. Torch runs each of them as a chain of five to ten operations,
// whose overhead on a small batch is larger than the arithmetic. Roundings follow the chain: a value that it rounds
// between two operations is rounded here too, so a bf16 result differs only where the order of a sum differs.
#include <bindings/checks.h>
#include <cpu/parallel.h>
#include <cpu/simd.h>

#include <cmath>
#include <type_traits>
#include <vector>

namespace eagle {
namespace {

using simd::BFloat16;
using simd::Floats;
using simd::kLanes;

constexpr int64_t kMinParallelElements = 1 << 16;  // below, waking other threads costs more than it saves

template <class T>
Floats rounded(Floats v) {
  if constexpr (std::is_same_v<T, float>) return v;
  T narrow[kLanes];
  simd::store(narrow, v);
  return simd::load(narrow);
}

// Calls f with the type of the tensors' elements; TypeError for anything but float32 and bfloat16.
template <class F>
void with_type(const TensorView& x, const char* name, F&& f) {
  if (same(x.dtype(), kF32)) return f(float{});
  if (same(x.dtype(), kBF16)) return f(BFloat16{});
  TVM_FFI_THROW(TypeError) << name << " is " << name_of(x.dtype()) << ", wanted float32 or bfloat16: convert it";
}

void check_lanes(int64_t size, const char* name) {
  if (size % 16) {
    TVM_FFI_THROW(ValueError) << name << " is " << size << ", wanted a multiple of 16: use the torch operations";
  }
}

template <class T>
void norm_row(const T* x, const T* weight, T* residual, T* out, float* row, int64_t n, float eps) {
  Floats squares{};
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats v = simd::load(x + i);
    if (residual) {
      v += simd::load(residual + i);
      simd::store(residual + i, v);
    }
    simd::store(row + i, v);
    squares += v * v;
  }
  const float scale = 1.0f / std::sqrt(simd::sum(squares) / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; i += kLanes) {
    simd::store(out + i, simd::load(row + i) * scale * simd::load(weight + i));
  }
}

template <class T, class C>
void rotate_head(T* head, const C* cos, const C* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const Floats c = rounded<T>(simd::load(cos + i)), s = rounded<T>(simd::load(sin + i));
    const Floats a = simd::load(head + i), b = simd::load(head + half + i);
    simd::store(head + i, rounded<T>(a * c) - rounded<T>(b * s));
    simd::store(head + half + i, rounded<T>(b * c) + rounded<T>(a * s));
  }
}

}  // namespace

// x [N, n], weight [n], out [N, n]; residual [N, n] or empty: x + residual is normed and replaces residual.
void rms_norm(TensorView x, TensorView weight, TensorView residual, TensorView out, double eps) {
  check(x, "x", x.dtype(), {kAny, kAny});
  const int64_t rows = x.size(0), n = x.size(1);
  const bool add = residual.size(0) > 0;
  check(weight, "weight", x.dtype(), {n});
  if (add) check(residual, "residual", x.dtype(), {rows, n});
  check(out, "out", x.dtype(), {rows, n});
  check_lanes(n, "the size of a row of x");
  with_type(x, "x", [&](auto type) {
    using T = decltype(type);
    parallel_for(rows, rows * n > kMinParallelElements, [&](int64_t i) {
      thread_local std::vector<float> row;
      row.resize(n);
      norm_row(ptr<T>(x) + i * n, ptr<T>(weight), add ? ptr<T>(residual) + i * n : nullptr, ptr<T>(out) + i * n,
               row.data(), n, static_cast<float>(eps));
    });
  });
}

// x [N, 2n] -> out [N, n]: silu of the first half times the second half.
void silu_and_mul(TensorView x, TensorView out) {
  check(out, "out", x.dtype(), {x.size(0), kAny});
  const int64_t rows = x.size(0), n = out.size(1);
  check(x, "x", x.dtype(), {rows, 2 * n});
  check_lanes(n, "the size of a row of out");
  with_type(x, "x", [&](auto type) {
    using T = decltype(type);
    parallel_for(rows, rows * n > kMinParallelElements, [&](int64_t i) {
      const T* gate = ptr<T>(x) + i * 2 * n;
      T* to = ptr<T>(out) + i * n;
      for (int64_t j = 0; j < n; j += kLanes) {
        const Floats g = simd::load(gate + j);
        const Floats silu = rounded<T>(g / (1.0f + simd::exp(-g)));
        simd::store(to + j, silu * simd::load(gate + n + j));
      }
    });
  });
}

// Rotates the first rotary_dim elements of every head of q [N, Hq, D] and k [N, Hk, D] in place, Neox style;
// cos_sin [positions, rotary_dim]: cosines, then sines; positions [N].
void rotary(TensorView positions, TensorView q, TensorView k, TensorView cos_sin) {
  const int64_t rows = q.size(0), dim = cos_sin.size(1), half = dim / 2, table = cos_sin.size(0);
  check(positions, "positions", kI64, {rows});
  const int64_t q_step = check_rows(q, "q", q.dtype(), {rows, kAny, kAny});
  const int64_t k_step = check_rows(k, "k", q.dtype(), {rows, kAny, q.size(2)});
  check(cos_sin, "cos_sin", cos_sin.dtype(), {kAny, kAny});
  check_lanes(half, "half of the rotated size");
  if (dim > q.size(2)) TVM_FFI_THROW(ValueError) << "cos_sin rotates " << dim << " elements of heads of " << q.size(2);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t at = ptr<int64_t>(positions)[i];
    if (at < 0 || at >= table) {
      TVM_FFI_THROW(ValueError) << "positions[" << i << "] is " << at << ", wanted 0 to " << table - 1
                                << ": raise the context length of the model";
    }
  }
  const int64_t size = q.size(2);
  with_type(q, "q", [&](auto type) {
    using T = decltype(type);
    with_type(cos_sin, "cos_sin", [&](auto table_type) {
      using C = decltype(table_type);
      parallel_for(rows, rows * (q_step + k_step) > kMinParallelElements, [&](int64_t i) {
        const C* cos = ptr<C>(cos_sin) + ptr<int64_t>(positions)[i] * dim;
        for (int64_t h = 0; h < q.size(1); ++h) rotate_head(ptr<T>(q) + i * q_step + h * size, cos, cos + half, half);
        for (int64_t h = 0; h < k.size(1); ++h) rotate_head(ptr<T>(k) + i * k_step + h * size, cos, cos + half, half);
      });
    });
  });
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm, eagle::rms_norm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul, eagle::silu_and_mul);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rotary, eagle::rotary);
