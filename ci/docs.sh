#!/usr/bin/env bash
# Builds the documentation site into build/site, with warnings as errors: bash ci/docs.sh
#
# Reads the Python sources without importing them: needs Python >= 3.10 with pip and venv, no
# compiler, no torch and no GPU. Settings: ci/setup_env.sh. python3 -m http.server -d build/site
# shows the site.
set -euo pipefail
# shellcheck source=ci/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"

step "Documentation: environment" "Look at pip's message above."
enter_venv
need_extra docs

step "Documentation: build" "Each line marked WARNING names the page and what to change."
NO_MKDOCS_2_WARNING=1 quiet docs python -m mkdocs build --strict
note "build/site/index.html"
