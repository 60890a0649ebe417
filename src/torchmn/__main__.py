"""``python -m torchmn`` is the same as ``torchmn``."""

from torchmn.cli.main import main

main()
