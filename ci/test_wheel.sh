#!/usr/bin/env bash
# Tests a wheel as a user has it: bash ci/test_wheel.sh WHEEL
#
# A clean environment with torch and this wheel only; then, with no network, no writable home and
# no compiler: import, `cake info`, and ci/wheel_smoke.py.
set -euo pipefail
# shellcheck source=ci/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

[[ $# == 1 && -f "$1" ]] || stop "Usage: bash ci/test_wheel.sh WHEEL"
wheel="$(realpath "$1")"
work="$(mktemp -d)"
clean="$work/venv" home="$work/home"
trap 'report_failure; rm -rf "$work"' EXIT

step "Clean environment" "Look at pip's message above."
make_venv "$clean"
install_torch "$clean/bin/python"

step "Install $(basename "$wheel")" "The wheel's requirements must be met by any torch >= 2.10."
before="$(torch_version "$clean/bin/python")"
"$clean/bin/python" -m pip install -qq --no-deps "$wheel"
"$clean/bin/python" -m pip install -qq "$wheel"
after="$(torch_version "$clean/bin/python")"
[[ "$before" == "$after" ]] || stop "Installing the wheel replaced torch $before by $after."
((CAKE_SYSTEM_SITE)) || "$clean/bin/python" -m pip check
note "torch $after stayed"

# alone COMMAND...: runs it in an empty folder with nothing but the environment.
mkdir -p "$home" "$work/empty"
alone() { (cd "$work/empty" && "${isolate[@]}" "${clear[@]}" "$@"); }
# torch warns when NumPy is absent, as it is here.
clear=(env -i HOME="$home" PATH="$clean/bin" LANG=C.UTF-8 PYTHONWARNINGS=ignore::UserWarning)
[[ -z "${LD_LIBRARY_PATH:-}" ]] || clear+=(LD_LIBRARY_PATH="$LD_LIBRARY_PATH")
# shellcheck disable=SC2016  # expanded by the inner shell
isolate=(unshare -rnm sh -c 'mount -t tmpfs -o ro none "$0" && exec "$@"' "$home")
if ! (cd "$work/empty" && "${isolate[@]}" true) 2>/dev/null; then
  isolate=()
  chmod 555 "$home"
  note "not isolated: unshare does not work here, so the network stays reachable"
fi

step "Import" "Run the line by hand in a new environment: python -c 'import cake'"
alone python -c 'import cake; print("   cake", cake.__version__)'
alone python -c 'import torch; import cake; print("   after torch", torch.__version__)'

step "cake info" "The command must print one JSON object without the extra \"cli\"."
alone python -m cake info --json >"$work/info.json"
"$clean/bin/python" -m json.tool "$work/info.json" >/dev/null
note "$(tr -d '\n' <"$work/info.json" | cut -c1-200)"

step "Smoke test" "ci/wheel_smoke.py says above which call was wrong."
cp "$ROOT/ci/wheel_smoke.py" "$work/empty"
alone python wheel_smoke.py
