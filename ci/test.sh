#!/usr/bin/env bash
# Every check of the repository, from a clean clone or again: bash ci/test.sh
#
# Needs a C++ compiler, Python >= 3.10 with pip and venv, and GoogleTest (installed by apt-get where
# that is allowed). Works without a GPU and without a CUDA toolkit: the CUDA sources are compiled
# all the same, by nvcc from PyPI's packages. Settings: ci/setup_env.sh. Logs: build/logs/.
set -euo pipefail
# shellcheck source=ci/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"

has_gtest() {
  [[ -n "${GTest_DIR:-}${GTest_ROOT:-}${CMAKE_PREFIX_PATH:-}" ]] ||
    echo '#include <gtest/gtest.h>' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1
}

need_gtest() {
  local hint="Install GoogleTest (Debian, Ubuntu: apt-get install libgtest-dev), or name the folder \
of its installation in CMAKE_PREFIX_PATH."
  local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q)
  has_gtest && return
  command -v apt-get >/dev/null || stop "$hint"
  if [[ $(id -u) != 0 ]]; then
    sudo -n true 2>/dev/null || stop "$hint"
    apt=(sudo -n "${apt[@]}")
  fi
  note "apt-get install libgtest-dev"
  HINT="$hint"
  quiet apt_update "${apt[@]}" update </dev/null
  quiet apt_install "${apt[@]}" install -y libgtest-dev </dev/null
}

step "Environment" "Look at pip's message above; a download that broke off can be repeated."
setup_env
need_nvcc
need_extra dev
# Every later cuobjdump reads the cubins of CUDA 13.0; the package begins at 13.2.
need cuobjdump "nvidia-cuda-cuobjdump>=13.2,<14" "nvidia-cuda-nvdisasm>=13.2,<14"
# CuTe's headers, for the layouts of the Blackwell instructions.
need cutlass --no-deps "nvidia-cutlass==4.2.0.0"
need_gtest

step "Lint: Python" "ruff check --fix . && ruff format . repair most; types are for you."
ruff check .
ruff format --check .
mypy

step "Lint: C++" "clang-format -i on the files named above."
find cpp '(' -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' ')' \
  -exec clang-format --dry-run -Werror {} +
note "clang-format: no change"

step "Layers" "Each line says what to do; the rules are in docs/design.md."
python ci/check_layers.py

step "Documentation" "See the step named above."
bash ci/docs.sh

step "C++ tests: build" "Read the log named above; remove build/tests to start afresh."
quiet configure cmake -S . -B build/tests -G Ninja -DCAKE_TESTS=ON -DCMAKE_BUILD_TYPE=Release \
  -DCAKE_CUTE_ORACLE=ON -DCAKE_TCGEN05_MODEL=ON \
  -DPython_EXECUTABLE="$CAKE_VENV/bin/python"
quiet build_tests cmake --build build/tests --parallel "$(jobs_count)"

step "C++ tests: run" "ctest --test-dir build/tests --rerun-failed --output-on-failure"
quiet ctest_host ctest --test-dir build/tests -L host --no-tests=error --output-on-failure \
  --parallel "$(jobs_count)"
note "host: $(grep 'tests passed' "$LOGS/ctest_host.log")"
if has_gpu; then
  quiet ctest_gpu ctest --test-dir build/tests -L gpu --no-tests=error --output-on-failure
  note "gpu: $(grep 'tests passed' "$LOGS/ctest_gpu.log")"
else
  note "no GPU: the device tests were compiled, not run"
fi

step "Wheel" "See the step named above."
bash ci/build_wheel.sh
wheel="$(ls dist/*.whl)"

step "Wheel: as pip builds it" "A build requirement is missing in pyproject.toml or cake_build.py."
# In pip's own isolated environment, as for a user; without CUDA, which was compiled just now.
quiet isolated python -m pip wheel . --no-deps -w build/isolated \
  --config-settings=cmake.define.CAKE_CUDA=OFF

step "Wheel: what it ships" "Each line marked - says what to change in the build."
python ci/check_binary.py "$wheel"

step "Wheel: in a clean environment" "See the step named above."
bash ci/test_wheel.sh "$wheel"

step "Python tests" "pytest --last-failed, in the environment $CAKE_VENV"
pip_install --force-reinstall --no-deps "$wheel"
rm -f "$CAKE_VENV/.cake-installed"
workers="$(jobs_count)"
has_gpu && workers=0 # one process on one GPU
((workers > 2)) && workers=2 # each holds a whole layer, 2 GB
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" python -m pytest -q -n "$workers"
