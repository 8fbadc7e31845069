# Commit, compilers and architectures for `cake info`.
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
