#!/usr/bin/env bash
# The tests of a tier beside each other, on every core up to eight: test.sh 'not slow' (make test) or
# test.sh slow (make test-all). Further arguments are pytest's.
# Most tests start processes, which begin in two thirds of the time with the bytecode of the first one.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONDONTWRITEBYTECODE=
# Ranks are threads, each of which would keep what it frees for itself: 640 MB for a worker, not 1 GB.
export MALLOC_ARENA_MAX=1
tier="$1"
shift
exec .venv/bin/python -m pytest -n auto --dist worksteal -m "$tier" "$@"
