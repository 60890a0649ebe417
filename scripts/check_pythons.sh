#!/usr/bin/env bash
# Check the wheel of the last commit in clean environments of every supported Python that is here.
#
# Of each Python: that `pip install torchmn`, `torchmn[mpi]` and `torchmn[all]` can be resolved, and,
# with what needs no torch installed, that the command starts, examines this host and writes a job
# script. `--train` installs torchmn, then its extras mpi and all, with torch (several gigabytes,
# unless the index has builds for CPUs), optionally with the requirements given (--train
# 'torch==2.6.*'), plans, and trains on two ranks.
# Pythons that are not here are listed and are no failure; PYTHONS='3.10 3.12' chooses some.
set -uo pipefail
cd "$(dirname "$0")/.."

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
train=no
if [ "${1:-}" = --train ]; then
  train=yes
  shift
fi

# A python3.12 on the path, or one of a version manager, that runs and has this version.
find_python() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if [ "$("$candidate" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' \
      2>/dev/null)" = "$1" ]; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# Runs a check of the current Python; its output is shown only if it fails.
check() {
  local name="$1"
  shift
  if "$@" >"$work/log" 2>&1; then
    passed="$passed $name,"
  else
    status=1
    passed="$passed $name FAILED,"
    echo "check_pythons: $version: $name failed: $*" >&2
    tail -n 15 "$work/log" >&2
  fi
}

# torch may be missing, which the doctor says by its exit status; it must find that out, not break.
examine() {
  local code=0
  "${run[@]}" doctor || code=$?
  case "$code" in 0 | 3 | 4) ;; *) return 1 ;; esac
}

DIST="$work/dist" bash scripts/dist.sh >/dev/null || exit 1
wheel="$(echo "$work"/dist/*.whl)"
cat >"$work/train.py" <<'PYTHON'
import torch
import torchmn

comm = torchmn.create_communicator("auto")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torchmn.create_multi_node_optimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), comm, model
)
torch.manual_seed(1 + comm.rank)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
weights = comm.allgather_obj(model.weight.detach().tolist())
assert all(each == weights[0] for each in weights), weights
PYTHON

status=0
table=''
for version in ${PYTHONS:-3.10 3.11 3.12 3.13 3.14}; do
  if ! python="$(find_python "$version")"; then
    table="$table$version  not here"$'\n'
    continue
  fi
  passed=''
  venv="$work/$version"
  "$python" -m venv "$venv" || { status=1; continue; }
  # The pip of an old Python reads gigabytes of wheels into memory again for each resolution.
  "$venv/bin/python" -m pip install --quiet --upgrade pip >"$work/log" 2>&1 || cat "$work/log" >&2
  mkdir "$work/folder-$version"
  touch "$work/folder-$version/train.py"
  for extra in '' '[mpi]' '[all]'; do
    [ "$train" = yes ] || check "resolves torchmn$extra" "$venv/bin/python" -m pip install --dry-run \
      --quiet --only-binary :all: "$wheel$extra"
  done
  # All that the metadata asks of this Python, but torch.
  "$venv/bin/python" - "$wheel" >"$work/requirements" <<'PYTHON'
import sys
import zipfile
from email.parser import Parser

from pip._vendor.packaging.requirements import Requirement

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
for text in metadata.get_all("Requires-Dist"):
    wanted = Requirement(text)
    if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
        if wanted.name != "torch":
            print(f"{wanted.name}{wanted.specifier}")
PYTHON
  check 'installs' "$venv/bin/python" -m pip install --quiet --only-binary :all: -r "$work/requirements"
  check 'no dependencies missing' "$venv/bin/python" -m pip install --quiet --no-deps "$wheel"
  run=(env -C "$work/folder-$version" "$venv/bin/torchmn")
  check '--version' "${run[@]}" --version
  check '--help' "${run[@]}" --help
  for command in run doctor plan report submit; do
    check "$command --help" "${run[@]}" "$command" --help
  done
  check 'doctor' examine
  check 'submit' "${run[@]}" submit --scheduler slurm --nodes 2 --per-node 4 --walltime 01:00:00 \
    --dry-run train.py
  if [ "$train" = yes ]; then
    # Each with the one before it in place, as somebody would add them.
    for extra in '' '[mpi]' '[all]'; do
      check "installs torchmn$extra" "$venv/bin/python" -m pip install --quiet --only-binary :all: \
        "$wheel$extra" "$@"
      check 'trains' "${run[@]}" run -n 2 "$work/train.py"
      case "$extra" in
        '[mpi]') check 'trains under mpirun' "${run[@]}" run --launcher mpirun -n 2 "$work/train.py" ;;
        '[all]')
          check 'imports' "$venv/bin/python" -c \
            'import cloudpickle, mpi4py.MPI, numba, PIL, prometheus_client, pytorch_pfn_extras, simplejpeg'
          check 'report' "${run[@]}" report
          check 'plan' "${run[@]}" plan --hosts 1,2 "$PWD/examples/imagenet/240_gpus.toml"
          ;;
      esac
    done
    passed="$passed with$("$venv/bin/python" -m pip list 2>/dev/null | sed -n 's/^torch  */ torch /p'),"
  fi
  rm -rf "$venv"
  table="$table$version ${passed%,}"$'\n'
done
printf '%s' "$table"
exit "$status"
