#!/usr/bin/env bash
# Runs the fused operation under NVIDIA's compute-sanitizer: bash ci/sanitize.sh [TOOL | T]...
#
#   bash ci/sanitize.sh                     every tool on every T, one process each
#   bash ci/sanitize.sh racecheck 3 256     this tool on these T
#
# Tools: memcheck racecheck synccheck initcheck. The token counts cover every kernel and plan of
# the operation on the GPU at hand:
#
#   compute capability 9
#      1  decode kernel, which finalizes
#      3  decode kernel
#     16  decode kernel, FC2 claims work from its pool; input rows that are not aligned to 16 bytes
#    256  prefill kernels, a cluster routes, FC1 with tiles of up to 64 pairs, FC2 claims work
#   2049  prefill kernels, FC1 with tiles of up to 88 pairs, FC2 in two parts
#   5505  prefill kernels, FC1 with tiles of up to 176 pairs, FC2 in three parts
#
#   compute capability 10: one kernel a stage for each size of tiles
#      3  up to 8 pairs, one CTA routes
#     16  up to 16 pairs, FC2 claims work from its pool
#     24  up to 32 pairs
#    129  up to 64 pairs, a cluster routes; input rows that are not aligned to 16 bytes
#   2049  up to 128 pairs, FC2 in four parts
#
# Prints one line for each tool and T. Exit status: 0 without errors; 1 when a tool reports an error
# (of racecheck: a hazard that is an error, not a warning) or a run fails, whose log is then kept;
# 2 when there is nothing to run: no compute-sanitizer, no supported GPU, no cake, or no library for
# racecheck.
#
# racecheck on compute capability 9 needs a library built with -DCAKE_EVERY_LANE_ARRIVES=ON (named in
# CAKE_LIBRARY): it does not follow the order of the lanes for which another one arrives, and would
# report races that there are not. With another library it is left out, unless it was asked for. Its
# batches take 352 tokens at most to the same 16 experts and leave the other tokens without any, so
# that the larger counts end within a minute, and the kernels of sm_90 deal items in halves.
#
# Needs a supported GPU, compute-sanitizer of the CUDA toolkit (in PATH, in $CUDA_HOME/bin, or named
# in COMPUTE_SANITIZER) and a python3 that can import cake. A run that takes longer than
# CAKE_SANITIZE_SECONDS (600) has failed. Sources need not be at hand; a library built with
# -DCAKE_LINEINFO=ON makes reports name their lines.
set -euo pipefail

TOOLS=(memcheck racecheck synccheck initcheck)
# T; kernels, pairs of a tile and parts of FC2 that it is there for; elements between input rows.
# shellcheck disable=SC2034  # chosen by name below
CASES_9=("1 decode 8 1 0" "3 decode 8 1 0" "16 decode 8 1 1" "256 prefill 64 1 0"
  "2049 prefill 88 2 0" "5505 prefill 176 3 0")
# shellcheck disable=SC2034
CASES_10=("3 sm100 8 1 0" "16 sm100 16 1 0" "24 sm100 32 1 0" "129 sm100 64 1 1"
  "2049 sm100 128 4 0")

ONE_CALL='
import json
import sys

import torch

import cake
from cake.check import Batch, Call, Layer, make_batch
from cake.testing import synthetic

kernels = sys.argv[2]
tokens, tile_pairs, parts, gap = (int(sys.argv[i]) for i in (1, 3, 4, 5))
plan = json.loads(torch.ops.cake.plan(tokens, major=torch.cuda.get_device_capability()[0]))
expected = {"kernels": kernels, "tile_pairs": tile_pairs, "fc2_parts": parts}
if not expected.items() <= plan.items():
    sys.exit(f"{tokens} tokens no longer lead to {expected}: {plan}")
gpu = torch.device("cuda")
call = Call(
    Layer(*synthetic.fill_random_prepared(0)).to(gpu), make_batch(tokens, sys.argv[6], 0).to(gpu)
)
# Memory that was never written, so that initcheck sees what is read too early.
call.workspace = torch.empty_like(call.workspace)
call.output = torch.empty_like(call.output)
cake.cake_fused_moe_prepare_workspace(call.workspace, tokens)
batch = call.batch
if sys.argv[6] == "same":
    batch.topk_ids[352:] = -1
rows = batch.tokens.new_empty(tokens, batch.tokens.shape[1] + gap)[:, : batch.tokens.shape[1]]
call.batch = Batch(rows.copy_(batch.tokens), batch.topk_ids, batch.topk_weights)
call.run()
torch.cuda.synchronize()
'

cannot() {
  printf 'ci/sanitize.sh cannot run: %s\n' "$*" >&2
  exit 2
}

find_sanitizer() {
  local candidate
  for candidate in "${COMPUTE_SANITIZER:-compute-sanitizer}" \
    "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer"; do
    command -v "$candidate" && return
  done
  return 1
}

# contains WORD WORD...: whether the first is among the others.
contains() {
  local word
  for word in "${@:2}"; do
    [[ "$word" != "$1" ]] || return 0
  done
  return 1
}

sanitizer="$(find_sanitizer)" ||
  cannot "no compute-sanitizer: install the CUDA toolkit, or name the program in COMPUTE_SANITIZER"
unset CAKE_BATCH_INVARIANT # it would turn the decode kernels off
reason="$(python3 -c 'import cake' 2>&1)" ||
  cannot "python3 cannot import cake: ${reason##*$'\n'}"
reason="$(python3 -c '
import sys, cake
supported, reason = cake.is_supported("cuda")
print(reason)
sys.exit(not supported)')" || cannot "no supported GPU: ${reason:-python3 says no more}"
major="$(python3 -c 'import torch; print(torch.cuda.get_device_capability()[0])')"
declare -n CASES="CASES_$major"

tools=() counts=()
for word in "$@"; do
  if contains "$word" "${TOOLS[@]}"; then
    tools+=("$word")
  elif contains "$word" "${CASES[@]%% *}"; then
    counts+=("$word")
  else
    cannot "expected ${TOOLS[*]} or ${CASES[*]%% *}, got $word"
  fi
done
((${#tools[@]})) || tools=("${TOOLS[@]}")
((${#counts[@]})) || counts=("${CASES[@]%% *}")
if contains racecheck "${tools[@]}" && [[ "$major" == 9 ]] && ! python3 -c '
import json, sys, torch, cake
sys.exit(not json.loads(torch.ops.cake.build_info())["every_lane_arrives"])'; then
  reason="racecheck needs a library of its own: cmake -S . -B build/racecheck \
-DCAKE_EVERY_LANE_ARRIVES=ON && cmake --build build/racecheck, then \
CAKE_LIBRARY=build/racecheck/libcake_ops.so"
  ! contains racecheck "$@" || cannot "$reason"
  printf 'Left out: %s\n' "$reason"
  tools=(memcheck synccheck initcheck)
fi

# Every tensor in an allocation of its own: reads beyond its end are then seen, and so are reads of
# what its memory held before.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

logs="$(mktemp -d)"

# sanitize TOOL ROUTING T KERNELS TILE_PAIRS PARTS GAP: one run; prints its line.
sanitize() {
  local tool="$1" routing="$2" tokens="$3" log="$logs/$1-$3.log" code=0 began=$SECONDS
  local errors verdict
  # torch tries calls that a driver may not have; those of the operation are checked by itself.
  timeout --kill-after=10 "${CAKE_SANITIZE_SECONDS:-600}" \
    "$sanitizer" --tool "$tool" --error-exitcode 1 --report-api-errors no \
    --target-processes application-only python3 -c "$ONE_CALL" "${@:3}" "$routing" \
    >"$log" 2>&1 || code=$?
  # "ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
  errors="$(sed -nE 's/.* SUMMARY: (.*[^0-9])?([0-9]+) errors?.*/\2/p' "$log" | tail -n 1)"
  if ((code == 124 || code == 137)); then
    verdict="FAILED: stopped after ${CAKE_SANITIZE_SECONDS:-600} s"
  elif [[ -z "$errors" ]]; then
    verdict="FAILED: exit status $code and no summary"
  elif ((errors)); then
    verdict="FAILED: $errors errors"
  elif ((code)); then
    verdict="FAILED: exit status $code"
  else
    verdict="ok"
  fi
  printf '%-10s T=%-5d %s (%d s)\n' "$tool" "$tokens" "$verdict" $((SECONDS - began))
  if [[ "$verdict" != ok ]]; then # the log may be on a machine that is soon gone
    grep -E 'Error:|Invalid|Uninitialized|Barrier error|access (at|by)' "$log" | sort | uniq -c |
      sort -rn | head -n 20 || true
  fi
  [[ "$verdict" == ok ]]
}

failed=0
for tool in "${tools[@]}"; do
  routing=random
  [[ "$tool" != racecheck ]] || routing=same
  for case in "${CASES[@]}"; do
    read -ra words <<<"$case"
    if contains "${words[0]}" "${counts[@]}"; then
      sanitize "$tool" "$routing" "${words[@]}" || failed=1
    fi
  done
done

if ((failed)); then
  printf 'Logs: %s\n' "$logs" >&2
else
  rm -rf "$logs"
fi
exit "$failed"
