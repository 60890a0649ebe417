"""Checkpoints: everything that is needed to resume training, written by all ranks together."""

from torchmn.checkpoint.checkpointer import MultiNodeCheckpointer
from torchmn.checkpoint.create import create_multi_node_checkpointer
from torchmn.checkpoint.dcp import export_dcp
from torchmn.checkpoint.manifest import Best
from torchmn.checkpoint.storage import FolderStorage
from torchmn.data.batch_settings import BatchSettings
from torchmn.data.rank_seeds import seed_ranks

__all__ = [
    "BatchSettings",
    "Best",
    "FolderStorage",
    "MultiNodeCheckpointer",
    "create_multi_node_checkpointer",
    "export_dcp",
    "seed_ranks",
]
