# The shared library that `import cake` loads: torch's stable ABI, no link against any torch.
if(NOT CAKE_TORCH_INCLUDE)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_SOURCE_DIR}/build_support/cake_build.py" torch
    OUTPUT_VARIABLE CAKE_TORCH_INCLUDE OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT CAKE_TORCH_INCLUDE)
    message(FATAL_ERROR "cake: no torch headers found. `pip install torch` (2.10 or newer) for "
      "${Python_EXECUTABLE}, or pass -DCAKE_TORCH_INCLUDE=<torch>/include.")
  endif()
endif()
message(STATUS "cake: torch headers in ${CAKE_TORCH_INCLUDE}")

# An empty library whose SONAME is libtorch.so: it gives ours a DT_NEEDED on the libtorch that
# `import torch` has mapped already (CPU and CUDA builds alike), without linking one.
file(WRITE "${CMAKE_BINARY_DIR}/torch_stub.cpp" "")
add_library(torch_stub SHARED "${CMAKE_BINARY_DIR}/torch_stub.cpp")
set_target_properties(torch_stub PROPERTIES OUTPUT_NAME torch
  LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/stub")
target_link_options(torch_stub PRIVATE -nostdlib)

add_library(cake_ops MODULE cpp/torch_ops.cpp)
set_target_properties(cake_ops PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "")
target_include_directories(cake_ops PRIVATE cpp/kernels)
target_include_directories(cake_ops SYSTEM PRIVATE "${CAKE_TORCH_INCLUDE}")
# Symbols of torch 2.10 only, whatever the headers' version.
target_compile_definitions(cake_ops PRIVATE TORCH_TARGET_VERSION=0x020a000000000000)
target_compile_options(cake_ops PRIVATE ${CAKE_CXX_FLAGS} "-ffile-prefix-map=${CAKE_TORCH_INCLUDE}/=")
target_link_options(cake_ops PRIVATE -Wl,--no-as-needed -Wl,--exclude-libs,ALL -Wl,--gc-sections)
target_link_libraries(cake_ops PRIVATE cake_core torch_stub ${CMAKE_DL_LIBS})
install(TARGETS cake_ops LIBRARY DESTINATION cake COMPONENT wheel)
