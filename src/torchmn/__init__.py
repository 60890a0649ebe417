"""torchmn: train PyTorch models on many workers.

The public names and the submodules load on first use, so that importing `torchmn` costs nothing and
needs no torch: after a plain ``import torchmn`` both `torchmn.GlobalSampler` and
`torchmn.compression.PowerSGD` are there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from torchmn.version import __version__ as __version__

if TYPE_CHECKING:
    from torchmn import checkpoint as checkpoint
    from torchmn import cntk as cntk
    from torchmn import communicators as communicators
    from torchmn import compression as compression
    from torchmn import data as data
    from torchmn import errors as errors
    from torchmn import evaluation as evaluation
    from torchmn import frameworks as frameworks
    from torchmn import functions as functions
    from torchmn import large_batch as large_batch
    from torchmn import launch as launch
    from torchmn import links as links
    from torchmn import optimizer as optimizer
    from torchmn import profiling as profiling
    from torchmn import readers as readers
    from torchmn import resilience as resilience
    from torchmn import schedules as schedules
    from torchmn import testing as testing
    from torchmn import topology as topology
    from torchmn import training as training
    from torchmn import transports as transports
    from torchmn import units as units
    from torchmn.checkpoint import create_multi_node_checkpointer, seed_ranks
    from torchmn.communicators import Communicator, Grid, create_communicator
    from torchmn.data import (
        GlobalSampler,
        SerialIterator,
        create_empty_dataset,
        create_multi_node_iterator,
        create_synchronized_iterator,
        scatter_dataset,
        scatter_index,
        split_dataset_n_random,
    )
    from torchmn.data.scatter_loader import scatter_loader
    from torchmn.errors import TorchmnError
    from torchmn.evaluation import GenericMultiNodeEvaluator, Ratio, create_multi_node_evaluator
    from torchmn.launch.launch_local import launch_local
    from torchmn.launch.multiprocess_updater import MultiprocessParallelUpdater
    from torchmn.optimizer import MultiNodeOptimizer, create_multi_node_optimizer
    from torchmn.resilience import Preemption, ReplicaCheck
    from torchmn.script import run_main
    from torchmn.topology import RankPlacement, Topology
    from torchmn.training import (
        AllreducePersistent,
        MultiNodeEarlyStoppingTrigger,
        ObservationAggregator,
        StandardUpdater,
        Trainer,
    )

_HOME = {
    "AllreducePersistent": "torchmn.training",
    "Communicator": "torchmn.communicators",
    "GenericMultiNodeEvaluator": "torchmn.evaluation",
    "GlobalSampler": "torchmn.data",
    "Grid": "torchmn.communicators",
    "MultiNodeEarlyStoppingTrigger": "torchmn.training",
    "MultiNodeOptimizer": "torchmn.optimizer",
    "MultiprocessParallelUpdater": "torchmn.launch.multiprocess_updater",
    "ObservationAggregator": "torchmn.training",
    "RankPlacement": "torchmn.topology",
    "Preemption": "torchmn.resilience",
    "Ratio": "torchmn.evaluation",
    "ReplicaCheck": "torchmn.resilience",
    "SerialIterator": "torchmn.data",
    "StandardUpdater": "torchmn.training",
    "Topology": "torchmn.topology",
    "TorchmnError": "torchmn.errors",
    "Trainer": "torchmn.training",
    "create_communicator": "torchmn.communicators",
    "create_empty_dataset": "torchmn.data",
    "create_multi_node_checkpointer": "torchmn.checkpoint",
    "create_multi_node_evaluator": "torchmn.evaluation",
    "create_multi_node_iterator": "torchmn.data",
    "create_multi_node_optimizer": "torchmn.optimizer",
    "create_synchronized_iterator": "torchmn.data",
    "launch_local": "torchmn.launch.launch_local",
    "run_main": "torchmn.script",
    "scatter_dataset": "torchmn.data",
    "scatter_index": "torchmn.data",
    "scatter_loader": "torchmn.data",
    "seed_ranks": "torchmn.checkpoint",
    "split_dataset_n_random": "torchmn.data",
}

__all__ = [
    "AllreducePersistent",
    "Communicator",
    "GenericMultiNodeEvaluator",
    "GlobalSampler",
    "Grid",
    "MultiNodeEarlyStoppingTrigger",
    "MultiNodeOptimizer",
    "MultiprocessParallelUpdater",
    "ObservationAggregator",
    "Preemption",
    "RankPlacement",
    "Ratio",
    "ReplicaCheck",
    "SerialIterator",
    "StandardUpdater",
    "Topology",
    "TorchmnError",
    "Trainer",
    "create_communicator",
    "create_empty_dataset",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "create_multi_node_iterator",
    "create_multi_node_optimizer",
    "create_synchronized_iterator",
    "launch_local",
    "run_main",
    "scatter_dataset",
    "scatter_index",
    "scatter_loader",
    "seed_ranks",
    "split_dataset_n_random",
]


_SUBMODULES = frozenset(
    {
        "checkpoint",
        "cntk",
        "communicators",
        "compression",
        "data",
        "errors",
        "evaluation",
        "frameworks",
        "functions",
        "large_batch",
        "launch",
        "links",
        "optimizer",
        "profiling",
        "readers",
        "resilience",
        "schedules",
        "testing",
        "topology",
        "training",
        "transports",
        "units",
    }
)


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return import_module(f"torchmn.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'torchmn' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
