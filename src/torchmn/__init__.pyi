"""What type checkers and editors know of the root, whose names load on first use."""

from torchmn import checkpoint as checkpoint
from torchmn import cluster as cluster
from torchmn import cntk as cntk
from torchmn import comm as comm
from torchmn import data as data
from torchmn import errors as errors
from torchmn import functions as functions
from torchmn import links as links
from torchmn import nn as nn
from torchmn import record as record
from torchmn import run as run
from torchmn import testing as testing
from torchmn import train as train
from torchmn.checkpoint import create_multi_node_checkpointer as create_multi_node_checkpointer
from torchmn.checkpoint import seed_ranks as seed_ranks
from torchmn.cluster import RankPlacement as RankPlacement
from torchmn.cluster import Topology as Topology
from torchmn.comm import Communicator as Communicator
from torchmn.comm import Grid as Grid
from torchmn.comm import Timeout as Timeout
from torchmn.comm import codecs
from torchmn.comm import create_communicator as create_communicator
from torchmn.control.script import run_main as run_main
from torchmn.data import GlobalSampler as GlobalSampler
from torchmn.data import SerialIterator as SerialIterator
from torchmn.data import create_empty_dataset as create_empty_dataset
from torchmn.data import create_multi_node_iterator as create_multi_node_iterator
from torchmn.data import create_synchronized_iterator as create_synchronized_iterator
from torchmn.data import scatter_dataset as scatter_dataset
from torchmn.data import scatter_index as scatter_index
from torchmn.data import split_dataset_n_random as split_dataset_n_random
from torchmn.data.scatter_loader import scatter_loader as scatter_loader
from torchmn.errors import TorchmnError as TorchmnError
from torchmn.errors import TorchmnWarning as TorchmnWarning
from torchmn.exchange import schedules as schedules
from torchmn.exchange.optimizer import MultiNodeOptimizer as MultiNodeOptimizer
from torchmn.exchange.optimizer import create_multi_node_optimizer as create_multi_node_optimizer
from torchmn.exchange.optimizer.ddp_hook import ddp_hook as ddp_hook
from torchmn.exchange.options import Auto as Auto
from torchmn.exchange.replica_check import ReplicaCheck as ReplicaCheck
from torchmn.run import Preemption as Preemption
from torchmn.run.launch_local import launch_local as launch_local
from torchmn.train import AllreducePersistent as AllreducePersistent
from torchmn.train import MultiNodeEarlyStoppingTrigger as MultiNodeEarlyStoppingTrigger
from torchmn.train import ObservationAggregator as ObservationAggregator
from torchmn.train import StandardUpdater as StandardUpdater
from torchmn.train import Trainer as Trainer
from torchmn.train import frameworks as frameworks
from torchmn.train.evaluation import GenericMultiNodeEvaluator as GenericMultiNodeEvaluator
from torchmn.train.evaluation import Ratio as Ratio
from torchmn.train.evaluation import create_multi_node_evaluator as create_multi_node_evaluator
from torchmn.train.multiprocess_updater import (
    MultiprocessParallelUpdater as MultiprocessParallelUpdater,
)

compression = codecs

__version__: str
__all__: list[str]
_HOME: dict[str, str]
_SUBMODULES: dict[str, str]
