# shellcheck shell=bash
# Sourced by the scripts in ci/: headed steps, and one virtual environment with the build tools.
#
#   CAKE_VENV         the environment's folder (default: .venv in the repository)
#   CAKE_PYTHON       the interpreter to make it with (default: the first Python >= 3.10 found)
#   CAKE_TORCH        what to install as torch, a pip requirement such as "torch==2.12.0". Default:
#                     "torch" (a CUDA build) where nvidia-smi finds a GPU, else "torch==2.13.0".
#                     Read when the environment has no torch yet.
#   CAKE_SYSTEM_SITE  1: the environment also sees the packages that CAKE_PYTHON has, torch among
#                     them (CAKE_PYTHON is then no virtual environment itself)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
CAKE_VENV="$(realpath -m "${CAKE_VENV:-$ROOT/.venv}")"
CAKE_SYSTEM_SITE="${CAKE_SYSTEM_SITE:-0}"
LOGS="$ROOT/build/logs"
export PIP_DISABLE_PIP_VERSION_CHECK=1

STEP="start"
HINT=""
STEP_BEGAN=$SECONDS

# step TITLE HINT: begins a headed step; the hint is printed if the step fails.
step() {
  [[ "$STEP" == start ]] || printf '   (%d s)\n' $((SECONDS - STEP_BEGAN))
  STEP="$1" HINT="${2:-}" STEP_BEGAN=$SECONDS
  printf '\n== %s\n' "$STEP"
}

note() { printf '   %s\n' "$*"; }

stop() {
  HINT="$*"
  exit 1
}

report_failure() {
  local code=$?
  ((code == 0)) || printf '\nFAILED (exit %d) in the step: %s\n%s\n' "$code" "$STEP" "$HINT" >&2
}
trap report_failure EXIT

# quiet NAME COMMAND...: output goes to build/logs/NAME.log; shown, its end, only on failure.
quiet() {
  local log="$LOGS/$1.log" code=0
  shift
  mkdir -p "$LOGS"
  "$@" >"$log" 2>&1 || code=$?
  if ((code)); then
    tail -n 60 "$log" >&2
    printf '\nThe whole log: %s\n' "$log" >&2
  fi
  return "$code"
}

has_gpu() { nvidia-smi -L >/dev/null 2>&1; }

jobs_count() { nproc 2>/dev/null || echo 2; }

pip_install() { "$CAKE_VENV/bin/python" -m pip install -qq "$@"; }

# need NAME REQUIREMENT...: installs once; a changed list is installed again.
need() {
  local stamp="$CAKE_VENV/.need-$1"
  shift
  if [[ "$(cat "$stamp" 2>/dev/null)" != "$*" ]]; then
    note "pip install $*"
    pip_install "$@"
    printf '%s\n' "$*" >"$stamp"
  fi
}

find_python() {
  local candidate
  for candidate in ${CAKE_PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# make_venv FOLDER: an environment with a pip that knows build settings.
make_venv() {
  local python site=()
  python="$(find_python)" || stop "Install Python 3.10 or newer, or name one in CAKE_PYTHON."
  ((CAKE_SYSTEM_SITE)) && site=(--system-site-packages)
  "$python" -m venv ${site[@]+"${site[@]}"} "$1" || {
    rm -rf "$1"
    stop "Python cannot make virtual environments: install its venv module" \
      "(Debian, Ubuntu: apt-get install python3-venv)."
  }
}

torch_requirement() {
  if [[ -n "${CAKE_TORCH:-}" ]]; then
    echo "$CAKE_TORCH"
  elif has_gpu; then
    echo "torch"
  else
    echo "torch==2.13.0"
  fi
}

# torch_version PYTHON: prints the version of its torch, nothing if there is none.
torch_version() {
  "$1" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true
}

# install_torch PYTHON: unless it has one already.
install_torch() {
  local wanted
  if [[ -z "$(torch_version "$1")" ]]; then
    ((CAKE_SYSTEM_SITE)) && stop "CAKE_SYSTEM_SITE=1, but $(find_python) has no torch."
    wanted="$(torch_requirement)"
    note "pip install $wanted (0.2 GB for a CPU build, about 3 GB for a CUDA build)"
    "$1" -m pip install -qq "$wanted"
  fi
  note "torch $(torch_version "$1")"
}

# The requirements of an extra of pyproject.toml, cake's own extras resolved, one a line.
extra_requirements() {
  python - "$ROOT/pyproject.toml" "$1" <<'PY'
import sys

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

with open(sys.argv[1], "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]


def resolve(name):
    for item in extras[name]:
        if item.startswith("cake-moe["):
            for other in item[len("cake-moe[") : -1].split(","):
                yield from resolve(other)
        else:
            yield item


print("\n".join(dict.fromkeys(resolve(sys.argv[2]))))
PY
}

# need_extra NAME: what that extra of the wheel asks for, without the wheel.
need_extra() {
  local list=()
  mapfile -t list < <(extra_requirements "$1")
  ((${#list[@]})) || stop "pyproject.toml has no extra named $1."
  need "$1" "${list[@]}"
}

# The five pinned packages of build_support/cake_build.py, where the machine has no CUDA toolkit.
need_nvcc() {
  local list=()
  if [[ -z "$(python "$ROOT/build_support/cake_build.py" nvcc)" ]]; then
    mapfile -t list < <(cd "$ROOT/build_support" && python -c \
      'import cake_build; print("\n".join(cake_build.NVCC))')
    need nvcc "${list[@]}"
  fi
  note "nvcc: $(python "$ROOT/build_support/cake_build.py" nvcc)"
}

# enter_venv: the environment; its programs come first on PATH from here.
enter_venv() {
  [[ -x "$CAKE_VENV/bin/python" ]] || make_venv "$CAKE_VENV"
  export PATH="$CAKE_VENV/bin:$PATH" VIRTUAL_ENV="$CAKE_VENV"
  unset PYTHONHOME
}

# setup_env: the environment, torch and the build tools.
setup_env() {
  command -v "${CXX:-c++}" >/dev/null || stop "Install a C++ compiler, GCC 11 or newer" \
    "(Debian, Ubuntu: apt-get install g++), or name one in CXX."
  enter_venv
  note "$(python --version) in $CAKE_VENV"
  need pip "pip>=22.1"
  install_torch python
  need build "scikit-build-core>=1.0" "cmake>=3.28" "ninja"
  if command -v ccache >/dev/null; then
    export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
    note "ccache: $(command -v ccache)"
  fi
}
