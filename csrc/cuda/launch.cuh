// Launches a kernel on torch's current stream. Nothing waits for the device, so a launch can be captured in a CUDA
// graph.
#pragma once
#include <cuda_runtime.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>

namespace eagle {

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, unsigned threads, DLDevice device,
            const Arguments&... arguments) {
  const tvm::ffi::CUDADeviceGuard guard(device.device_id);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << name << " was not launched: " << cudaGetErrorString(error);
}

}  // namespace eagle
