#!/usr/bin/env bash
# Install the wheel of the last commit into a new environment and run tests from a folder outside of
# the checkout: those of the sdist, without its src. Arguments are pytest's.
#
# The environment has the dependencies of .venv by a .pth file with the path of its packages. Python
# does not read the .pth files of such a folder, and the torchmn of the checkout is in one of them.
set -euo pipefail
cd "$(dirname "$0")/.."
here="$PWD"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
[ $# -gt 0 ] || set -- -n auto --dist worksteal tests/unit

DIST="$work/dist" bash scripts/dist.sh
tar -x -C "$work" -f "$work"/dist/*.tar.gz
mv "$work"/torchmn-* "$work/outside"
rm -r "$work/outside/src"

.venv/bin/python -m venv --without-pip "$work/venv"
.venv/bin/python -m pip --python "$work/venv/bin/python" install --quiet --no-deps --no-index \
  "$work"/dist/*.whl
packages="$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
  >"$packages/dependencies.pth"

cd "$work/outside"
export PATH="$work/venv/bin:$here/.venv/bin:$PATH"
unset PYTHONPATH
# What is tested is what was installed, in ranks that a launcher starts, too.
cat >"$work/origin.py" <<'PYTHON'
import sys
from pathlib import Path

import torchmn

if not Path(torchmn.__file__).is_relative_to(sys.prefix):
    sys.exit(f"test-wheel: this is the torchmn of {torchmn.__file__}, not the one installed.")
PYTHON
python "$work/origin.py"
torchmn run -n 2 --log-dir "$work/logs" "$work/origin.py"
python -m pytest "$@"
