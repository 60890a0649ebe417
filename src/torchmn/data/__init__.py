"""Data on many ranks: shards, global batches and iterators."""

from torchmn.data.batch_size import num_samples
from torchmn.data.gather_samples import gather_by_index, gather_outputs
from torchmn.data.global_sampler import EmptyBatchCollate, GlobalSampler
from torchmn.data.multi_node_iterator import create_multi_node_iterator
from torchmn.data.scatter import create_empty_dataset, scatter_dataset, scatter_index, shard_bounds
from torchmn.data.scatter_loader import scatter_loader
from torchmn.data.scattered_stream import StreamLoader
from torchmn.data.serial_iterator import SerialIterator
from torchmn.data.sub_dataset import SubDataset, split_dataset, split_dataset_n_random
from torchmn.data.synchronized_iterator import create_synchronized_iterator

__all__ = [
    "EmptyBatchCollate",
    "GlobalSampler",
    "SerialIterator",
    "StreamLoader",
    "SubDataset",
    "create_empty_dataset",
    "create_multi_node_iterator",
    "create_synchronized_iterator",
    "gather_by_index",
    "gather_outputs",
    "num_samples",
    "scatter_dataset",
    "scatter_index",
    "scatter_loader",
    "shard_bounds",
    "split_dataset",
    "split_dataset_n_random",
]
