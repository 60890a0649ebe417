#!/usr/bin/env bash
# Slurm and munge for `make test-slurm`: Debian's packages, installed once. Needs root. The tests
# start daemons of their own, so those that the packages start are stopped and kept from starting.
set -euo pipefail

need=(slurmctld slurmd srun sbatch munged)
missing=()
for tool in "${need[@]}"; do
  command -v "$tool" >/dev/null || [ -x "/usr/sbin/$tool" ] || missing+=("$tool")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
  echo "setup_slurm: ${missing[*]} missing, and only root can install them: apt-get install" \
    "slurm-wlm munge" >&2
  exit 1
fi
# A policy for this one installation: no service is started.
policy=/usr/sbin/policy-rc.d
had_policy=no
[ -e "$policy" ] && had_policy=yes
if [ "$had_policy" = no ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurm-wlm slurmd slurmctld slurm-client munge
