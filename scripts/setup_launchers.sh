#!/usr/bin/env bash
# The launchers of `make test-launchers`: MPICH's wheel in an environment of its own, .venv-mpich,
# which finds torch and the rest in .venv (mpi4py loads the MPI of its own environment), and with
# root Debian's Open MPI and sshd. What cannot be had is said, and its tests are skipped.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

readonly MPICH_VERSION=5.0.2
readonly MPICH=.venv-mpich

if [ ! -x "$MPICH/bin/mpiexec" ]; then
  rm -rf "$MPICH"
  .venv/bin/python -m venv "$MPICH" &&
    "$MPICH/bin/pip" install --quiet --disable-pip-version-check \
      "mpich==$MPICH_VERSION" mpi4py || {
    rm -rf "$MPICH"
    echo "setup_launchers: the wheels mpich and mpi4py cannot be installed" >&2
  }
fi
if [ -x "$MPICH/bin/python" ]; then
  of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
  echo "import site; site.addsitedir('$(of .venv)')" >"$(of "$MPICH")/packages_of_venv.pth"
fi

missing=()
[ -x /usr/bin/mpirun.openmpi ] || missing+=(openmpi-bin)
[ -x /usr/sbin/sshd ] || missing+=(openssh-server)
command -v ssh >/dev/null || missing+=(openssh-client)
# shellcheck source=scripts/apt_install.sh
. scripts/apt_install.sh
[ ${#missing[@]} -eq 0 ] || apt_install "${missing[@]}" || true
