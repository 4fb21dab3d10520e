// A vector whose elements start with no value: for memory that is written whole before it is read, where zeros would
// cost as much as the writing.
#pragma once

#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace torchext::cpu {

template <class T>
struct UninitialisedAllocator : std::allocator<T> {
  static_assert(std::is_trivial_v<T>, "an element without a value must be of a type that needs none");
  template <class U>
  // NOLINTBEGIN(readability-identifier-naming): the names that std::allocator_traits looks for
  struct rebind {
    using other = UninitialisedAllocator<U>;
  };
  // NOLINTEND(readability-identifier-naming)

  template <class U>
  void construct(U* at) {
    ::new (static_cast<void*>(at)) U;
  }
  template <class U, class... Args>
  void construct(U* at, Args&&... args) {
    ::new (static_cast<void*>(at)) U(std::forward<Args>(args)...);
  }
};

template <class T>
using Buffer = std::vector<T, UninitialisedAllocator<T>>;

}  // namespace torchext::cpu
