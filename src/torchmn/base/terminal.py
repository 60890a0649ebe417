"""What torchmn's own processes print on the terminal: results of commands, and failures.

Everything else goes through `torchmn.base.log`. The output of ranks is shown by
`torchmn.run.console`.
"""

import sys


def say(text: str) -> None:
    """Print a message to standard error, prefixed with ``torchmn:``."""
    print(f"torchmn: {text}", file=sys.stderr, flush=True)
