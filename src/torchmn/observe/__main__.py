"""``python -m torchmn.observe FOLDER``: put together the profiles of a run's ranks."""

import sys
from pathlib import Path

from torchmn.base.terminal import say
from torchmn.control.script import run_main
from torchmn.record.merged_trace import finish_profile


def main() -> None:
    """Merge the profiles and print the paths of the results."""
    folders = [Path(text) for text in sys.argv[1:]]
    if not folders:
        say("usage: python -m torchmn.observe FOLDER...")
        raise SystemExit(2)
    for folder in folders:
        for line in finish_profile(folder) or [f"{folder} has no profiles."]:
            print(line)


if __name__ == "__main__":
    run_main(main)
