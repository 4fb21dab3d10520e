# What every target of our own is built with.
#
#   torchext_own(target)                               warnings as errors, sanitizers
#   torchext_add_test(name LABELS l... SOURCES s... LIBRARIES t... ENVIRONMENT v=x...)
#                                                      a GoogleTest executable, each of its tests in ctest

if(TORCHEXT_SANITIZE STREQUAL "address")
  set(_torchext_sanitize -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
elseif(TORCHEXT_SANITIZE STREQUAL "thread")
  set(_torchext_sanitize -fsanitize=thread -fno-omit-frame-pointer)
elseif(TORCHEXT_SANITIZE)
  message(FATAL_ERROR "TORCHEXT_SANITIZE = \"${TORCHEXT_SANITIZE}\": allowed are \"\", \"address\" and \"thread\"")
endif()
if(_torchext_sanitize)
  list(APPEND _torchext_sanitize -O1 -g1)
endif()

function(torchext_own target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror)
  if(_torchext_sanitize)
    target_compile_options(${target} PRIVATE ${_torchext_sanitize})
    target_link_options(${target} PUBLIC ${_torchext_sanitize})
    # Property tests run fewer schedules under a sanitizer.
    target_compile_definitions(${target} PRIVATE TORCHEXT_SANITIZED=1)
  endif()
endfunction()

function(torchext_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "LABELS;SOURCES;LIBRARIES;ENVIRONMENT")
  add_executable(${name} ${arg_SOURCES})
  torchext_own(${name})
  target_link_libraries(${name} PRIVATE ${arg_LIBRARIES} GTest::gtest_main)
  set(properties LABELS "${arg_LABELS}" TIMEOUT 120)
  if(arg_ENVIRONMENT)
    list(APPEND properties ENVIRONMENT "${arg_ENVIRONMENT}")
  endif()
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST PROPERTIES ${properties})
endfunction()
