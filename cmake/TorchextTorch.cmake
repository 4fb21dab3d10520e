# torch, as the wheel of one Python has it: headers, libc10 and libtorch_cpu. No Python and no CUDA is linked.
#
#   torchext::torch   empty where that Python has no torch: TORCHEXT_TORCH_TESTS=OFF says that this is meant
find_package(Python REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
    "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '', end='')"
  OUTPUT_VARIABLE TORCHEXT_TORCH_DIR COMMAND_ERROR_IS_FATAL ANY)
if(NOT TORCHEXT_TORCH_DIR)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no torch, which the tests of csrc/c10d need: name one that has it by "
    "-DPython_EXECUTABLE=..., or leave those tests out by -DTORCHEXT_TORCH_TESTS=OFF")
endif()

add_library(torchext_torch INTERFACE)
target_include_directories(torchext_torch SYSTEM INTERFACE
  "${TORCHEXT_TORCH_DIR}/include" "${TORCHEXT_TORCH_DIR}/include/torch/csrc/api/include")
# The wheel has no nlohmann: stubs stand in, behind what is there.
target_compile_options(torchext_torch INTERFACE "-idirafter${PROJECT_SOURCE_DIR}/csrc/c10d/stubs")
target_link_libraries(torchext_torch INTERFACE
  "${TORCHEXT_TORCH_DIR}/lib/libtorch_cpu.so" "${TORCHEXT_TORCH_DIR}/lib/libc10.so")
target_link_options(torchext_torch INTERFACE
  "-Wl,-rpath,${TORCHEXT_TORCH_DIR}/lib" "-Wl,--unresolved-symbols=ignore-in-shared-libs")
add_library(torchext::torch ALIAS torchext_torch)
