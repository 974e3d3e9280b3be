// Facts about the library: instruction set and OpenMP runtime.
#include <bindings/checks.h>

#include "parallel.h"

namespace eagle {

std::string isa() {
#if defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "generic";
#endif
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(isa, eagle::isa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(openmp_library, eagle::openmp_library);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(max_threads, eagle::max_threads);
