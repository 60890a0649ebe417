#!/usr/bin/env bash
# Slurm, Grid Engine and OpenPBS for `make test-schedulers`, installed once. Needs root.
#
# Slurm and Grid Engine are Debian's packages. OpenPBS is built (about 15 minutes) from the checkout
# in OPENPBS_SOURCE, else from a clone, and installed into OPENPBS_PREFIX (default: /opt/openpbs).
# The tests start daemons of their own, so those that the packages start are kept from starting. The
# tests of a scheduler that cannot be had are skipped with a reason.
set -euo pipefail

prefix=${OPENPBS_PREFIX:-/opt/openpbs}
has() { command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || [ -x "$prefix/sbin/$1" ]; }
say() { echo "setup_schedulers: $*" >&2; }

packages=()
has slurmctld && has munged || packages+=(slurm-wlm slurmd slurmctld slurm-client munge)
has sge_qmaster && has sge_execd || packages+=(gridengine-master gridengine-exec gridengine-client)
has pbs_server || packages+=(
  autoconf automake g++ git libtool make pkg-config postgresql postgresql-server-dev-all swig
  libcjson-dev libedit-dev libexpat1-dev libhwloc-dev libical-dev libncurses-dev libssl-dev
  libx11-dev libxt-dev python3-dev tcl-dev tk-dev zlib1g-dev
)
# shellcheck source=scripts/apt_install.sh
. "$(dirname "$0")/apt_install.sh"
[ ${#packages[@]} -eq 0 ] || apt_install "${packages[@]}" || exit 0
has pbs_server && exit 0

build=$(mktemp -d)
if ! git clone -q --depth 1 "${OPENPBS_SOURCE:-https://github.com/openpbs/openpbs.git}" "$build/openpbs"; then
  say "no source of OpenPBS: its tests will be skipped. Set OPENPBS_SOURCE to a checkout of it."
  exit 0
fi
cd "$build/openpbs"
{
  ./autogen.sh
  ./configure --prefix="$prefix" --libexecdir="$prefix/libexec"
  nice -n 19 make -j"$(nproc)"
  make install
} >"$build/log" 2>&1 || {
  say "OpenPBS could not be built, see $build/log: its tests will be skipped."
  exit 0
}
rm -rf "$build"
