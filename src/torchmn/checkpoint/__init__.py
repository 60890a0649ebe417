"""Checkpoints: everything that is needed to resume training, written by all ranks together."""

from torchmn.checkpoint.checkpointer import MultiNodeCheckpointer, SaveRecord
from torchmn.checkpoint.create import create_multi_node_checkpointer
from torchmn.checkpoint.dcp import export_dcp
from torchmn.checkpoint.manifest import Best
from torchmn.checkpoint.snapshot import HasReplicatedTensors, Stateful
from torchmn.checkpoint.storage import FolderStorage
from torchmn.data.batch_settings import BatchSettings, HasBatchSettings
from torchmn.data.rank_seeds import RandomStreams, seed_ranks
from torchmn.exchange.resharding import HasResumeWarnings, Resharding

__all__ = [
    "BatchSettings",
    "Best",
    "FolderStorage",
    "HasBatchSettings",
    "HasReplicatedTensors",
    "HasResumeWarnings",
    "MultiNodeCheckpointer",
    "RandomStreams",
    "Resharding",
    "SaveRecord",
    "Stateful",
    "create_multi_node_checkpointer",
    "export_dcp",
    "seed_ranks",
]
