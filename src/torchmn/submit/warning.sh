# The scheduler has no signal before the limit: this shell sends it, @before_s@ s before.
(
  trap '' USR1 USR2; trap 'kill "$!"; exit' TERM
  sleep @after_s@ & wait "$!" && kill -s USR1 $$
) &
trap 'kill %2 2>/dev/null' EXIT
