"""torchmn: train PyTorch models on many workers.

The public names and the submodules load on first use, so that importing `torchmn` costs nothing and
needs no torch: after a plain ``import torchmn`` both `torchmn.GlobalSampler` and
`torchmn.schedules.EveryStep` are there.
"""

from __future__ import annotations

import sys
from importlib import import_module

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError(
        "torchmn does not work on Windows (this is win32): ranks are started, bound to cores and "
        "ended by means of Linux. Use WSL 2, which is Linux."
    )

_HOME = {
    "AllreducePersistent": "torchmn.train",
    "Auto": "torchmn.exchange.options",
    "Communicator": "torchmn.comm",
    "GenericMultiNodeEvaluator": "torchmn.train.evaluation",
    "GlobalSampler": "torchmn.data",
    "Grid": "torchmn.comm",
    "MultiNodeEarlyStoppingTrigger": "torchmn.train",
    "MultiNodeOptimizer": "torchmn.exchange.optimizer",
    "MultiprocessParallelUpdater": "torchmn.train.multiprocess_updater",
    "ObservationAggregator": "torchmn.train",
    "Preemption": "torchmn.run",
    "RankPlacement": "torchmn.cluster",
    "Ratio": "torchmn.train.evaluation",
    "ReplicaCheck": "torchmn.exchange.replica_check",
    "SerialIterator": "torchmn.data",
    "StandardUpdater": "torchmn.train",
    "Timeout": "torchmn.comm",
    "Topology": "torchmn.cluster",
    "TorchmnError": "torchmn.errors",
    "TorchmnWarning": "torchmn.errors",
    "Trainer": "torchmn.train",
    "create_communicator": "torchmn.comm",
    "create_empty_dataset": "torchmn.data",
    "create_multi_node_checkpointer": "torchmn.checkpoint",
    "create_multi_node_evaluator": "torchmn.train.evaluation",
    "create_multi_node_iterator": "torchmn.data",
    "create_multi_node_optimizer": "torchmn.exchange.optimizer",
    "create_synchronized_iterator": "torchmn.data",
    "ddp_hook": "torchmn.exchange.optimizer",
    "launch_local": "torchmn.run.launch_local",
    "run_main": "torchmn.control.script",
    "scatter_dataset": "torchmn.data",
    "scatter_index": "torchmn.data",
    "scatter_loader": "torchmn.data",
    "seed_ranks": "torchmn.checkpoint",
    "split_dataset_n_random": "torchmn.data",
}

__all__ = list(_HOME)

_SUBMODULES = {
    "checkpoint": "torchmn.checkpoint",
    "cluster": "torchmn.cluster",
    "cntk": "torchmn.cntk",
    "comm": "torchmn.comm",
    "data": "torchmn.data",
    "errors": "torchmn.errors",
    "functions": "torchmn.functions",
    "links": "torchmn.links",
    "nn": "torchmn.nn",
    "record": "torchmn.record",
    "run": "torchmn.run",
    "testing": "torchmn.testing",
    "train": "torchmn.train",
    "compression": "torchmn.comm.codecs",
    "frameworks": "torchmn.train.frameworks",
    "schedules": "torchmn.exchange.schedules",
}
"""Attributes that are modules. The last three are short names of packages within wings."""


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return import_module(_SUBMODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'torchmn' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
