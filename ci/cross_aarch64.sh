#!/usr/bin/env bash
# Compiles everything but the CUDA kernels for aarch64 on another machine: bash ci/cross_aarch64.sh
#
# Warnings are errors. With qemu-user the C++ host tests run too. Needs what ci/setup_env.sh
# installs, and the cross compiler (Debian, Ubuntu: g++-aarch64-linux-gnu qemu-user).
set -euo pipefail
# shellcheck source=ci/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"

target=aarch64-linux-gnu
command -v "$target-g++" >/dev/null || stop "Install the cross compiler (Debian, Ubuntu:" \
  "apt-get install g++-$target qemu-user)."
setup_env
options=(-G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCAKE_CUDA=OFF
  -DCMAKE_CXX_COMPILER="$target-g++" -DCMAKE_C_COMPILER="$target-gcc"
  -DPython_EXECUTABLE="$(command -v python)")
emulator="$(command -v qemu-aarch64 || true)"
[[ -z "$emulator" ]] || options+=("-DCMAKE_CROSSCOMPILING_EMULATOR=$emulator;-L;/usr/$target")

step "aarch64: library with the operators" "Guard what only x86-64 has; the log is named above."
quiet cross_ops_configure cmake -S . -B build/aarch64 "${options[@]}" -DCMAKE_CXX_FLAGS=-Werror
quiet cross_ops cmake --build build/aarch64 --parallel "$(jobs_count)"
note "$(file -b build/aarch64/libcake_ops.so 2>/dev/null | cut -c1-60)"

step "aarch64: C++ tests" "Read the log named above; remove build/aarch64-tests to start afresh."
quiet cross_configure cmake -S . -B build/aarch64-tests "${options[@]}" -DCAKE_TESTS=ON
if [[ -z "$emulator" ]]; then
  quiet cross_tests cmake --build build/aarch64-tests --parallel "$(jobs_count)" --target cake_core
  note "no qemu-aarch64: the library was compiled, the tests were not run"
else
  quiet cross_tests cmake --build build/aarch64-tests --parallel "$(jobs_count)"
  quiet cross_ctest ctest --test-dir build/aarch64-tests -L host --no-tests=error \
    --output-on-failure --parallel "$(jobs_count)"
  note "emulated: $(grep 'tests passed' "$LOGS/cross_ctest.log")"
fi
