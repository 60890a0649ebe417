"""CNTK's ``cntk.metrics``."""

from torchmn.cntk.losses import classification_error

__all__ = ["classification_error"]
