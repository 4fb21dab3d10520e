# What every target of our own is built with.
#
#   torchext_own(target)                               warnings as errors, sanitizers
#   torchext_add_test(name [TORCH parts] LABELS l... SOURCES s... LIBRARIES t...)
#                                                      a GoogleTest executable, each of its cases in ctest; TORCH: it
#                                                      loads torch, whose libraries no sanitizer sees into, for half a
#                                                      second, so that ctest sees this many parts of many cases each

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
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TORCH" "LABELS;SOURCES;LIBRARIES")
  add_executable(${name} ${arg_SOURCES})
  torchext_own(${name})
  target_link_libraries(${name} PRIVATE ${arg_LIBRARIES} GTest::gtest_main)
  set(environment "")
  if(TORCHEXT_SANITIZE STREQUAL "thread")
    set(options "suppressions=${PROJECT_SOURCE_DIR}/tools/tsan.supp")
    if(arg_TORCH)  # races between two accesses of ours are found
      string(PREPEND options "ignore_noninstrumented_modules=1 ")
    endif()
    set(environment "TSAN_OPTIONS=${options}")
  endif()
  if(NOT arg_TORCH)
    set(properties LABELS "${arg_LABELS}" TIMEOUT 120)
    if(environment)
      list(APPEND properties ENVIRONMENT "${environment}")
    endif()
    gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST PROPERTIES ${properties})
    return()
  endif()
  foreach(number RANGE 1 ${arg_TORCH})
    # tools/run_tests.py knows parts by this name, and reads their cases from these reports.
    set(part "${name}.part${number}of${arg_TORCH}")
    math(EXPR index "${number} - 1")
    set(shard "GTEST_TOTAL_SHARDS=${arg_TORCH};GTEST_SHARD_INDEX=${index}")
    set(output "GTEST_OUTPUT=xml:${CMAKE_BINARY_DIR}/parts/${part}.xml")
    add_test(NAME ${part} COMMAND ${name})
    # COST: what takes longest begins first.
    set_tests_properties(${part} PROPERTIES
      LABELS "${arg_LABELS}" TIMEOUT 300 COST 100 ENVIRONMENT "${shard};${output};${environment}")
  endforeach()
endfunction()
