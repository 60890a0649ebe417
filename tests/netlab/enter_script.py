"""The script that a launcher calls in place of ssh to enter a test host."""

from collections.abc import Collection
from pathlib import Path

from tests.netlab.namespaces import tool

_SCRIPT = """#!/bin/sh
# Enters a test host as ssh would: [OPTIONS] HOST [COMMAND ...]. The command gets the environment
# of a login, not the caller's.
while :; do
  case ${{1:-}} in
    -[bcDEeFIiJLlmOopQRSWw]) shift 2 ;;
    -*) shift ;;
    *) break ;;
  esac
done
host=${{1:-}}
[ $# -gt 0 ] && shift
case ${{host#*@}} in
{cases}
  *) echo "$0: no host '$host' in this lab" >&2; exit 255 ;;
esac
exec {nsenter} $entry_options -- {taskset} -c "$cores" env -i HOME="${{HOME:-/root}}" USER=root \\
  LOGNAME=root SHELL=/bin/sh PATH="$PATH" ${{TERM:+TERM="$TERM"}} \\
  /bin/sh -c "[ -e '{is_open}' ] || exit 255; cd; ${{*:-exec /bin/sh -i}}"
"""


def host_case(*, name: str, address: str, entry_options: Collection[str], cores: str) -> str:
    """The line of one host: ``entry_options`` of nsenter, ``cores`` for taskset."""
    return f"  {name}|{address}) entry_options='{' '.join(entry_options)}' cores={cores} ;;"


def enter_script(cases: Collection[str], *, is_open: Path) -> str:
    """The text of the script, which rejects every entry after ``is_open`` was removed."""
    return _SCRIPT.format(
        is_open=is_open, cases="\n".join(cases), nsenter=tool("nsenter"), taskset=tool("taskset")
    )
