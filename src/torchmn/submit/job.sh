#!/bin/bash
@directives@

# Written by `torchmn submit` for @title@. Edit it as you like; submit it in
# the same folder, with the folder of its logs: mkdir -p @log_dir@ && @by_hand@

cd "@folder@" || exit 1
job=@job_id@
logs=@log_dir@
log="$logs/@name@.$job.$(date +%Y%m%d-%H%M%S)"
mkdir -m 700 -p "$logs" || exit 1
@redirection@
end_job() {
  echo "@ended@ $1"
  exit "${2:-$1}"
}

@environment@
command -v torchmn >/dev/null || {
  echo "torchmn: torchmn is not installed on $(hostname): use --activate" >&2
  end_job 127
}

echo "@title@ job $job on $(hostname), $(date '+%Y-%m-%d %H:%M:%S %z')"
python3 - <<'VERSIONS'
import importlib.metadata, sys
wanted = ("torch", "numpy", "mpi4py", "nvidia-nccl", "nvidia-cudnn", "nvidia-cuda-runtime")
found = {(d.name or "").lower(): d.version for d in importlib.metadata.distributions()}
versions = [f"{name} {found[name]}" for name in sorted(found) if name.startswith(wanted)]
print(", ".join([f"python {sys.version.split()[0]}", *versions]))
VERSIONS

@progress@
# A signal of the scheduler goes to all ranks; this shell waits for their end.
pass_on() { signaled=$1; kill -s "$1" "$run"; }
for name in TERM USR1 USR2; do trap "pass_on $name" "$name"; done
torchmn run @options@ --log-dir "$log" \
  @command@ &
run=$!
@warning@
signaled=no
until [ -z "$signaled" ]; do
  last=$signaled signaled=
  wait "$run"
  status=$?
done
@requeue@
end_job "$status"
