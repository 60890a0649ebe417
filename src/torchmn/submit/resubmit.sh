limit=$(sed -n 's/^limit //p' "$log.progress")
early=no; [ "$(date +%s)" -ge "${limit:-9999999999}" ] || early=yes
state=@state@
if [ "$state,$early" = @ending@,yes ]; then
  echo "torchmn: not resubmitted: @title@ @verb@ or requeues this job" >&2
elif @command@; then
  @before@
  echo "@resubmitted@ @name@"
else
  echo "torchmn: @program@ failed on $(hostname): @by_hand@" >&2
fi
