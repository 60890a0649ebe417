"""CNTK's ``cntk.train.trainer``."""

from torchmn.cntk.trainer import Trainer

__all__ = ["Trainer"]
