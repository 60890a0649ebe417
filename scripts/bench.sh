#!/usr/bin/env bash
# Run every benchmark and name those that failed.
set -u
cd "$(dirname "$0")/.." || exit 1

failed=()
for file in benchmarks/bench_*.py; do
  if [ ! -e "$file" ]; then
    echo "bench: there is no benchmarks/bench_*.py." >&2
    exit 1
  fi
  echo "== $file"
  .venv/bin/python "$file" || failed+=("$file")
done
if [ "${#failed[@]}" -gt 0 ]; then
  echo "bench: failed: ${failed[*]}" >&2
  exit 1
fi
