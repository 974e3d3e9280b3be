// A device guard for CUDA that does nothing. A torch without CUDA asks for one when a fake CUDA tensor is indexed.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA,
                                                    new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
}
