"""Checkpoints: everything a training needs to go on, written by all ranks, never half."""

from torchmn.checkpoint.checkpointer import MultiNodeCheckpointer, SaveRecord
from torchmn.checkpoint.create import create_multi_node_checkpointer
from torchmn.checkpoint.dcp import export_dcp, import_dcp
from torchmn.checkpoint.restore import Noting, Resharding
from torchmn.checkpoint.retention import Best
from torchmn.checkpoint.seed_ranks import RandomStreams, seed_ranks
from torchmn.checkpoint.snapshot import PromisesReplicas, Stateful
from torchmn.checkpoint.storage import FolderStorage, Storage

__all__ = [
    "Best",
    "FolderStorage",
    "MultiNodeCheckpointer",
    "Noting",
    "PromisesReplicas",
    "RandomStreams",
    "Resharding",
    "SaveRecord",
    "Stateful",
    "Storage",
    "create_multi_node_checkpointer",
    "export_dcp",
    "import_dcp",
    "seed_ranks",
]
