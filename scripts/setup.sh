#!/usr/bin/env bash
# Make .venv with what some targets of the Makefile need: setup.sh train test. Other words, and none,
# install everything.
#
# Does nothing when .venv is up to date. The first line of .venv/made-by-setup is a checksum of what
# it depends on and the folder, for scripts in .venv hold absolute paths and break when it is moved;
# the second one names the extras that are installed, to which further targets add theirs. It says
# "unfinished" while this script works; if it still does at the next run, that one starts afresh.
# Every failure is one sentence and a non-zero exit; pip's own words are in .venv-setup.log.
set -u
cd "$(dirname "$0")/.." || exit 1

readonly MARK=.venv/made-by-setup
readonly LOG=.venv-setup.log
readonly TRAIN='trainer examples'
readonly TEST="$TRAIN compression images mpi notebook report translation test dist"
readonly ALL="$TEST docs dev"

fail() {
  echo "setup: $1" >&2
  exit 1
}

mark() {
  echo "$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum) $PWD"
}

first_line_of_mark() {
  [ -r "$MARK" ] && { read -r line <"$MARK"; echo "$line"; }
}

# The extras that are installed, from the second line of the mark.
installed() {
  local extras=''
  [ -r "$MARK" ] && { read -r _ && read -r extras; } <"$MARK"
  echo "$extras"
}

# The extras that targets of the Makefile need.
extras_of() {
  local target extras=''
  for target in "${@:-setup}"; do
    case "$target" in
      train) extras="$extras $TRAIN" ;;
      test | test-schedulers | test-launchers | check-gpu | pages | chaos | bench | bench-*)
        extras="$extras $TEST"
        ;;
      docs) extras="$extras docs" ;;
      lint) extras="$extras $TEST dev" ;; # mypy reads the libraries that the sources import
      dist | check-pythons) extras="$extras dist" ;;
      *) extras="$extras $ALL" ;;
    esac
  done
  echo "$extras"
}

# Words, each of them once.
once() {
  local word all=''
  for word in "$@"; do
    case " $all " in *" $word "*) ;; *) all="$all $word" ;; esac
  done
  echo "${all# }"
}

has_all_wanted() {
  local extra present
  present=" $(installed) "
  for extra in $wanted; do
    case "$present" in *" $extra "*) ;; *) return 1 ;; esac
  done
}

is_up_to_date() {
  [ -x .venv/bin/python ] && is_python_wanted && [ "$(first_line_of_mark)" = "$(mark)" ] &&
    has_all_wanted
}

# Whether .venv has the version of the Python that the user named, if he named one.
is_python_wanted() {
  [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" --version 2>&1)" = "$(.venv/bin/python --version 2>&1)" ]
}

# Whether what is there can be brought up to date and need not be made anew.
is_reusable() {
  case "$(first_line_of_mark)" in
    *" $PWD") .venv/bin/python -c '' 2>/dev/null && is_python_wanted ;;
    *) return 1 ;;
  esac
}

# "3.11" if this command is a Python that we support and that can make environments, else a reason.
verdict_on() {
  "$1" -c '
import sys
version = "%d.%d" % sys.version_info[:2]
if not (3, 10) <= sys.version_info[:2] <= (3, 14):
    print("is " + version)
else:
    try:
        import ensurepip, venv
        print(version)
    except ImportError:
        print("lacks the venv module")
' 2>/dev/null || echo 'does not run'
}

choose_python() {
  local candidates=(python3 python3.14 python3.13 python3.12 python3.11 python3.10) found='' word
  if [ -n "${PYTHON:-}" ]; then
    candidates=("$PYTHON")
  fi
  for candidate in "${candidates[@]}"; do
    if [ -z "${PYTHON:-}" ]; then
      command -v "$candidate" >/dev/null 2>&1 || continue
    fi
    word="$(verdict_on "$candidate")"
    case "$word" in
      3.*)
        python="$candidate"
        return
        ;;
      'does not run')
        # or a shim of a version manager for a version that is not there
        [ -z "${PYTHON:-}" ] || found="$candidate, which does not run"
        ;;
      *) found="$found${found:+, }$candidate $word" ;;
    esac
  done
  case "$found" in
    *'lacks the venv module'*)
      fail "a Python 3.10 to 3.14 is here but cannot make environments ($found); install its venv module (Debian: apt install python3-venv)."
      ;;
    *)
      fail "torchmn needs Python 3.10 to 3.14 and found ${found:-none}; install one, or name one: make setup PYTHON=/path/to/python3.12."
      ;;
  esac
}

# The sentence for what went wrong, from the log and a look at the disk.
explain() {
  local step="$1" last
  if grep -qsi 'no space left on device\|errno 28\|disk quota exceeded' "$LOG" || ! has_room; then
    fail "the disk is full (in $(pwd), or where pip keeps its files, ${TMPDIR:-/tmp}): make room and try again."
  fi
  if grep -qs 'Retrying (Retry\|NewConnectionError\|Max retries exceeded\|ProxyError\|Read timed out\|Temporary failure in name resolution\|Network is unreachable' "$LOG"; then
    fail "the package index cannot be reached: check the network, or set PIP_INDEX_URL to one that can (details in $LOG)."
  fi
  last="$(grep -so 'ERROR: .*' "$LOG" | grep -v 'dependency resolver' | head -n 1)"
  [ -n "$last" ] || last="$(tail -n 1 "$LOG" 2>/dev/null)"
  last="${last#ERROR: }"
  fail "$step failed: ${last:-no reason given} (details in $LOG)."
}

# A megabyte, for a disk is also full when files of a few bytes still fit.
has_room() {
  head -c 1048576 /dev/zero 2>/dev/null >.venv-setup.probe
  local result=$?
  rm -f .venv-setup.probe
  return "$result"
}

main() {
  local wanted
  wanted="$(once $(extras_of "$@"))"
  trap 'echo "setup: interrupted; the next run starts afresh." >&2; exit 130' INT TERM
  is_up_to_date && exit 0
  choose_python

  # Two makes at once must not fill the same folder.
  if command -v flock >/dev/null 2>&1; then
    { exec 9>>"$LOG"; } 2>/dev/null || explain 'opening the log'
    flock 9 || fail "the lock on $LOG cannot be taken."
    is_up_to_date && exit 0
  fi

  if [ -e .venv ] && [ ! -e "$MARK" ]; then
    fail ".venv is here but setup did not make it: move it away and try again."
  fi
  if is_reusable; then
    wanted="$(once $(installed) $wanted)"
    echo "setup: adding to .venv what is missing ..." >&2
  else
    rm -rf .venv || fail ".venv cannot be removed: remove it by hand and try again."
    echo "setup: making .venv with $("$python" --version 2>&1), which takes a minute or more once ..." >&2
  fi
  { : >"$LOG" && mkdir -p .venv && echo unfinished >"$MARK"; } 2>/dev/null || explain 'making .venv'
  if [ ! -x .venv/bin/python ]; then
    "$python" -m venv .venv >>"$LOG" 2>&1 || explain 'making .venv'
  fi
  # Without --no-compile half of the time goes into modules that nobody imports.
  .venv/bin/python -m pip install --disable-pip-version-check --no-compile \
    --constraint constraints.txt --editable ".[${wanted// /,}]" >>"$LOG" 2>&1 || explain 'pip install'
  { mark && echo "$wanted"; } 2>/dev/null >"$MARK" || explain 'finishing .venv'
  is_up_to_date || explain 'finishing .venv'
  echo 'setup: done.' >&2
}

# Bash reads a script as it goes: within a function the whole file has been read before pip starts.
main "$@"
