#!/usr/bin/env bash
# All tests beside each other, on every core up to eight. What fails there runs once more, one test at
# a time, and only what fails again fails: many tests have time limits, and the cores are shared. The
# output has both runs, so that a test that fails now and then is seen.
# Most tests start processes, which begin in two thirds of the time with the bytecode of the first one.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONDONTWRITEBYTECODE=
status=0
.venv/bin/python -m pytest -n auto --dist worksteal "$@" || status=$?
[ "$status" -eq 1 ] || exit "$status" # 1: tests have failed
echo "test: once more, one at a time, what has failed beside other tests:"
exec .venv/bin/python -m pytest "$@" -n 0 -x --last-failed --last-failed-no-failures none
