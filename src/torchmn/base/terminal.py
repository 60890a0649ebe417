"""The one place from which processes of torchmn write lines of their own to the terminal.

What ranks print is shown by `torchmn.run.console`.
"""

import sys


def say(text: str) -> None:
    """Write a message of torchmn to standard error."""
    print(f"torchmn: {text}", file=sys.stderr, flush=True)
