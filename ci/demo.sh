#!/usr/bin/env bash
# Builds cake in an environment of its own and runs its demo: bash ci/demo.sh [OPTION OF cake demo]...
#
# Needs a C++ compiler and Python >= 3.10 with pip and venv; no GPU and no CUDA toolkit. The first
# run downloads torch. Which one, and where things go: CAKE_TORCH and the rest in ci/setup_env.sh.
# CAKE_WHEEL=FILE installs that wheel instead of building one.
set -euo pipefail
# shellcheck source=ci/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

step "Environment" "Look at pip's message above; a download that broke off can be repeated."
setup_env
need_nvcc

step "Build and install cake" "Read the log named above; remove build/wheel to start afresh."
installed="$CAKE_VENV/.cake-installed"
sources=("$ROOT"/{CMakeLists.txt,pyproject.toml,README.md,build_support,cmake,cpp,src})
if [[ -n "${CAKE_WHEEL:-}" ]]; then
  quiet install python -m pip install --force-reinstall --no-deps "$CAKE_WHEEL"
  need_extra cli
elif [[ -f "$installed" && -x "$CAKE_VENV/bin/cake" &&
  -z "$(find "${sources[@]}" -name __pycache__ -prune -o -newer "$installed" -print -quit)" ]]; then
  note "up to date"
else
  touch "$installed.new"
  # Our tools, not an isolated environment: the build folder stays valid from run to run.
  quiet install python -m pip install --force-reinstall --no-deps --no-build-isolation \
    --config-settings=build-dir="$ROOT/build/wheel" "$ROOT"
  need_extra cli
  mv "$installed.new" "$installed"
fi

step "cake demo $*" "bash ci/test.sh tells whether the installation is sound."
"$CAKE_VENV/bin/cake" demo "$@"
