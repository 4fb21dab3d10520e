#include "python/bindings.h"

PYBIND11_MODULE(_C, module) {
  // The base classes of ours are bound there.
  py::module_::import("torch._C._distributed_c10d");
  torchext::bindC10d(module);
  torchext::bindCalibration(module);
  torchext::bindSynchronizer(module);
  torchext::bindPrague(module);
  torchext::bindDear(module);
  torchext::bindDSSync(module);
  torchext::bindHop(module);
  torchext::bindFactors(module);
  torchext::bindKfac(module);
  torchext::bindAuto(module);
  torchext::bindPipeline(module);
}
