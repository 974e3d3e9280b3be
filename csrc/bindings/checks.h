// Argument checks: every tensor that a kernel receives is compared with the dtype, shape and device it must have.
#pragma once
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <initializer_list>
#include <sstream>
#include <string>

namespace eagle {
using tvm::ffi::TensorView;

constexpr DLDataType kI32{kDLInt, 32, 1}, kI64{kDLInt, 64, 1}, kF32{kDLFloat, 32, 1}, kF64{kDLFloat, 64, 1},
    kBool{kDLBool, 8, 1}, kF16{kDLFloat, 16, 1}, kBF16{kDLBfloat, 16, 1}, kE4M3{kDLFloat8_e4m3fn, 8, 1},
    kE5M2{kDLFloat8_e5m2, 8, 1};
constexpr int64_t kAny = -1;  // a size that is not checked
#if defined(__CUDACC__)
constexpr DLDeviceType kDevice = kDLCUDA;  // of the tensors that this library takes
constexpr char kMove[] = "a CUDA device: move it with .cuda()";
#else
constexpr DLDeviceType kDevice = kDLCPU;
constexpr char kMove[] = "the CPU: move it with .cpu()";
#endif
constexpr bool kChecksValues = kDevice == kDLCPU;  // on a GPU the host would have to wait

template <class T>
T* ptr(const TensorView& t) {
  return static_cast<T*>(t.data_ptr());
}

inline bool same(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

inline std::string name_of(DLDataType t) {
  if (same(t, kE4M3)) return "float8_e4m3fn";
  if (same(t, kE5M2)) return "float8_e5m2";
  const char* kind = t.code == kDLBool     ? "bool"
                     : t.code == kDLInt    ? "int"
                     : t.code == kDLUInt   ? "uint"
                     : t.code == kDLFloat  ? "float"
                     : t.code == kDLBfloat ? "bfloat"
                                           : "dtype";
  return t.code == kDLBool ? kind : kind + std::to_string(t.bits);
}

inline std::string shape_of(const TensorView& t) {
  std::ostringstream s;
  s << '[';
  for (int i = 0; i < t.ndim(); ++i) s << (i ? ", " : "") << t.size(i);
  s << ']';
  return s.str();
}

[[noreturn]] inline void refuse_shape(const char* name, const TensorView& t, std::initializer_list<int64_t> shape) {
  std::ostringstream wanted;
  const char* comma = "";
  for (int64_t size : shape) {
    wanted << comma << (size == kAny ? "*" : std::to_string(size));
    comma = ", ";
  }
  TVM_FFI_THROW(ValueError) << name << " has shape " << shape_of(t) << ", wanted [" << wanted.str()
                            << "]: pass a tensor of that shape";
  throw;
}

inline void check_dtype(const TensorView& t, const char* name, DLDataType dtype) {
  if (!same(t.dtype(), dtype)) {
    TVM_FFI_THROW(TypeError) << name << " is " << name_of(t.dtype()) << ", wanted " << name_of(dtype)
                             << ": convert it with .to()";
  }
  if (t.device().device_type != kDevice) TVM_FFI_THROW(ValueError) << name << " is not on " << kMove;
}

inline void check_shape(const TensorView& t, const char* name, std::initializer_list<int64_t> shape) {
  if (t.ndim() != static_cast<int>(shape.size())) refuse_shape(name, t, shape);
  int axis = 0;
  for (int64_t size : shape) {
    if (size != kAny && t.size(axis) != size) refuse_shape(name, t, shape);
    ++axis;
  }
}

// The first axis may have any stride (a slice of a fused projection); returns that stride in elements.
inline int64_t check_rows(const TensorView& t, const char* name, DLDataType dtype,
                          std::initializer_list<int64_t> shape) {
  check_dtype(t, name, dtype);
  check_shape(t, name, shape);
  int64_t inner = 1;
  bool dense = true;
  for (int axis = t.ndim() - 1; axis > 0; --axis) {
    dense = dense && (t.size(axis) == 1 || t.stride(axis) == inner);
    inner *= t.size(axis);
  }
  if (!dense && inner > 0 && t.size(0) > 0) {  // the strides of an empty tensor mean nothing
    TVM_FFI_THROW(ValueError) << name << " has gaps inside its rows, wanted contiguous rows: call .contiguous()";
  }
  return t.ndim() > 0 && t.size(0) > 1 ? t.stride(0) : inner;
}

struct CacheStrides {
  int64_t slot, head;  // elements from one slot to the next, and from one head to the next
};

// A cache [slots, heads, D] may have any strides but for a contiguous last axis: an engine can keep the keys and the
// values of a head side by side.
inline CacheStrides check_cache(const TensorView& t, const char* name, DLDataType dtype,
                                std::initializer_list<int64_t> shape) {
  check_dtype(t, name, dtype);
  check_shape(t, name, shape);
  if (t.size(2) > 1 && t.stride(2) != 1 && t.size(0) > 0 && t.size(1) > 0) {
    TVM_FFI_THROW(ValueError) << name
                              << " has gaps inside its heads, wanted a contiguous last axis: call .contiguous()";
  }
  const int64_t head = t.size(1) > 1 ? t.stride(1) : t.size(2);
  return {t.size(0) > 1 ? t.stride(0) : head * t.size(1), head};
}

inline void check(const TensorView& t, const char* name, DLDataType dtype, std::initializer_list<int64_t> shape) {
  const int64_t row_stride = check_rows(t, name, dtype, shape);
  int64_t inner = 1;
  for (int axis = 1; axis < t.ndim(); ++axis) inner *= t.size(axis);
  if (row_stride != inner && inner > 0) {
    TVM_FFI_THROW(ValueError) << name << " has gaps between its rows, wanted a contiguous tensor: call .contiguous()";
  }
}

}  // namespace eagle
