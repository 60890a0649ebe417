#!/usr/bin/env bash
# Build the sdist, and the wheel from it, into dist/ (or the folder DIST) out of the last commit.
#
# The same commit gives the same bytes, in any folder, at any time and with any umask: the builders
# have the versions of constraints.txt, and times are that of the commit.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "dist: $1" >&2
  exit 1
}

git rev-parse --git-dir >/dev/null 2>&1 ||
  fail 'this folder is no checkout, and the last commit is what is built; elsewhere use python -m build.'
python="${PYTHON:-$PWD/.venv/bin/python}"
mkdir -p "${DIST:-dist}"
out="$(cd "${DIST:-dist}" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

[ -z "$(git status --porcelain)" ] || echo 'dist: changes that are not committed are not in it.' >&2
version="$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/torchmn/__init__.py)"
[ "$(git tag --points-at HEAD "v$version")" ] ||
  echo "dist: not a release, for this commit has no tag v$version." >&2

git archive --prefix=torchmn/ HEAD | tar -x -C "$work"
SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)"
export SOURCE_DATE_EPOCH
"$python" -m build --no-isolation --outdir "$work/dist" "$work/torchmn" >"$work/log" 2>&1 ||
  { cat "$work/log" >&2; fail 'the build failed.'; }
"$python" -m twine --no-color check --strict "$work"/dist/* >"$work/log" 2>&1 ||
  { cat "$work/log" >&2; fail 'a package index would not show the description.'; }
mv "$work"/dist/* "$out"
cd "$out" && sha256sum "torchmn-$version.tar.gz" "torchmn-$version-py3-none-any.whl"
