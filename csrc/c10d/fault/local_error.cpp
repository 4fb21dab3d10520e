#include "c10d/fault/local_error.h"

#include <new>
#include <stdexcept>

#include <c10/util/Exception.h>

namespace torchext {

std::optional<std::string> localError(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::DistError&) {
    return std::nullopt;
  } catch (const c10::Error& fault) {
    return fault.what_without_backtrace();
  } catch (const std::runtime_error& fault) {
    return fault.what();
  } catch (const std::logic_error& fault) {
    return fault.what();
  } catch (const std::bad_alloc&) {
    return "out of memory";
  } catch (...) {
    return std::nullopt;
  }
}

}  // namespace torchext
