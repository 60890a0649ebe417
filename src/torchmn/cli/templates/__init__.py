"""The beginnings of training scripts that ``torchmn init`` writes, for the user to change.

`image` is a whole one; the others end before its `evaluate`, and continue as it does.
"""
