# The bill of materials in the wheel's metadata (PEP 770).
if(CAKE_CUDA)
  list(GET CUDAToolkit_INCLUDE_DIRS 0 _cuda_include)
endif()
if(CAKE_NVTX)
  set(_nvtx_include "${CAKE_NVTX}")
endif()
string(REPLACE "\"" "" _architectures "${CAKE_CUDA_ARCH_JSON}")
string(REPLACE "_" "-" _name "${SKBUILD_PROJECT_NAME}")
execute_process(COMMAND "${Python_EXECUTABLE}" "${CMAKE_SOURCE_DIR}/build_support/cake_sbom.py"
  "${CMAKE_BINARY_DIR}/cake-moe.cdx.json"
  "name=${_name}" "version=${CAKE_VERSION}"
  "commit=${CAKE_COMMIT}" "dirty=${CAKE_DIRTY}"
  "system=${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}" "architectures=${_architectures}"
  "cxx_compiler=${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
  "cuda_compiler=${CAKE_CUDA_COMPILER}" "cmake=CMake ${CMAKE_VERSION}"
  "cuda_include=${_cuda_include}" "nvtx_include=${_nvtx_include}" "torch_include=${CAKE_TORCH_INCLUDE}"
  COMMAND_ERROR_IS_FATAL ANY)
install(FILES "${CMAKE_BINARY_DIR}/cake-moe.cdx.json" DESTINATION "${SKBUILD_METADATA_DIR}/sboms"
  COMPONENT wheel)
