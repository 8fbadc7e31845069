# CAKE_COMMIT and CAKE_DIRTY for `cake info` and the bill of materials. As a script (cmake -P, in the
# source folder) it writes them to the header OUTPUT, if they have changed.
find_program(CAKE_GIT git)
set(CAKE_COMMIT "unknown")
set(CAKE_DIRTY "null")
if(CAKE_GIT)
  execute_process(COMMAND "${CAKE_GIT}" rev-parse --short=12 HEAD
    WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}" OUTPUT_VARIABLE _commit RESULT_VARIABLE _failed
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT _failed)
    set(CAKE_COMMIT "${_commit}")
    execute_process(COMMAND "${CAKE_GIT}" status --porcelain --untracked-files=no
      WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}" OUTPUT_VARIABLE _changes ERROR_QUIET)
    if(_changes STREQUAL "")
      set(CAKE_DIRTY "false")
    else()
      set(CAKE_DIRTY "true")
    endif()
  endif()
endif()
if(CMAKE_SCRIPT_MODE_FILE)
  configure_file("${CMAKE_SOURCE_DIR}/cpp/kernels/commit.h.in" "${OUTPUT}" @ONLY)
endif()
