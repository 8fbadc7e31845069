# nvcc from an installed toolkit, else from the PyPI packages; cudart is linked statically.
if(NOT CMAKE_CUDA_COMPILER)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_SOURCE_DIR}/build_support/cake_build.py" nvcc
    OUTPUT_VARIABLE CMAKE_CUDA_COMPILER OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "cake: no nvcc found. Install CUDA 13, or `pip install` the packages listed as "
      "NVCC in build_support/cake_build.py, or pass -DCAKE_CUDA=OFF for a CPU-only build.")
  endif()
endif()
cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH _bin)
cmake_path(GET _bin PARENT_PATH _cuda)
if(EXISTS "${_cuda}/lib/libcudart_static.a" AND NOT EXISTS "${_cuda}/lib/libcudart.so")
  # PyPI's packages: libraries in lib/, where nvcc's own profile says lib64/, and only a versioned
  # libcudart.so, which FindCUDAToolkit does not see.
  set(ENV{LIBRARY_PATH} "${_cuda}/lib:$ENV{LIBRARY_PATH}")  # for the compiler check's link
  set(CUDAToolkit_ROOT "${_cuda}")
  file(GLOB _cudart "${_cuda}/lib/libcudart.so*")
  list(GET _cudart 0 _cudart)
  set(CUDA_CUDART "${_cudart}" CACHE FILEPATH "" FORCE)
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
find_path(CAKE_NVTX nvtx3/nvToolsExt.h PATHS ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH NO_CACHE)
if(NOT CAKE_NVTX)
  message(STATUS "cake: no nvtx3/nvToolsExt.h in ${CUDAToolkit_INCLUDE_DIRS}: built without NVTX ranges")
endif()
set(CAKE_CUDA_COMPILER "nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
message(STATUS "cake: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION} for ${CAKE_CUDA_ARCHITECTURES}")
list(TRANSFORM CAKE_CUDA_ARCHITECTURES REPLACE "(.*)-real" "\"sm_\\1\"" OUTPUT_VARIABLE _archs)
list(JOIN _archs ", " CAKE_CUDA_ARCH_JSON)

# CUDA flags and libraries of a target that holds our kernels or launches them.
function(cake_cuda_target target)
  set_target_properties(${target} PROPERTIES
    CUDA_ARCHITECTURES "${CAKE_CUDA_ARCHITECTURES}" CUDA_VISIBILITY_PRESET hidden CUDA_STANDARD 20)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size
    $<$<BOOL:${CAKE_LINEINFO}>:-lineinfo>
    -Werror=all-warnings
    $<IF:$<BOOL:${CAKE_EVERY_LANE_ARRIVES}>,-DCAKE_EVERY_LANE_ARRIVES,-Xptxas=--warn-on-spills$<COMMA>--warn-on-local-memory-usage>
    -Xcompiler=-Wall,-ffp-contract=off,-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=>)
  target_link_libraries(${target} PUBLIC CUDA::cudart_static)
endfunction()
