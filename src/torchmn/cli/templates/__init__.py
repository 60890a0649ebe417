"""Training scripts that `torchmn init` copies: complete programs, one for each kind of data.

Their ``main`` is the same; a test compares them, and trains with each on two ranks.
"""
