#!/usr/bin/env bash
# Builds the wheel of HEAD twice and compares: bash ci/reproduce.sh [--cpu-only]
#
# Two fresh clones, one after the other in the same folder, whose path nvcc makes names of; both use
# the environment that ci/setup_env.sh makes. docs/release.md says what else has to be equal.
set -euo pipefail
# shellcheck source=ci/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

work="$(mktemp -d)"
trap 'report_failure; rm -rf "$work"' EXIT
commit="$(git -C "$ROOT" rev-parse HEAD)"
export CAKE_VENV CCACHE_DISABLE=1

for number in first second; do
  step "The $number build" "See the step named above."
  rm -rf "$work/cake"
  git clone -q "$ROOT" "$work/cake"
  git -C "$work/cake" checkout -q "$commit"
  bash "$work/cake/ci/build_wheel.sh" "$@"
  mv "$work/cake/dist" "$work/$number"
done

step "Compare" "Files that differ are named above; docs/release.md has what made them so before."
first=("$work"/first/*.whl) second=("$work"/second/*.whl)
if ! cmp "${first[0]}" "${second[0]}"; then
  "$CAKE_VENV/bin/python" - "${first[0]}" "${second[0]}" <<'PY'
import sys
from zipfile import ZipFile

one, other = ({i.filename: i for i in ZipFile(name).infolist()} for name in sys.argv[1:])
for name in sorted(one.keys() | other.keys()):
    facts = [a.get(name) and (a[name].CRC, a[name].date_time, a[name].external_attr) for a in (one, other)]
    if facts[0] != facts[1]:
        print("  ", name, *facts)
PY
  exit 1
fi
note "$(sha256sum "${first[0]}" | cut -d' ' -f1)  $(basename "${first[0]}"), twice"
