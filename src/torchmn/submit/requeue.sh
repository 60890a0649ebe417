
# Exit status @saved@: saved before the time limit, continue in a new job.
if [ "$status" -eq @saved@ ]; then
  history="$logs/@name@.$job.requeues"
  touch "$history" "$log.progress"
  num_requeues=$(wc -l <"$history")
  saved=$(grep '^checkpoint' "$log.progress" | tail -n 1)
  if ! grep -q '^exit' "$log.progress"; then
    echo "torchmn: not resubmitted: a rank exited with @saved@, but not because torchmn.Preemption ended it" >&2
  elif [ -n "$saved" ] && [ "$saved" = "$(tail -n 1 "$history")" ]; then
    echo "torchmn: not resubmitted: no progress since the last time, the newest is the $saved; @by_hand@" >&2
  elif [ "$num_requeues" -ge @limit@ ]; then
    echo "torchmn: not resubmitted: this was done @limit@ times already (--max-requeues); @by_hand@" >&2
  else
    echo "${saved:-unknown $log}" >>"$history"
    @resubmission@
  fi
fi
