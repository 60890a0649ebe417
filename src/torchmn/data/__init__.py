"""Data on many workers: shards, global batches, iterators and image files."""

from torchmn.data.empty_dataset import EmptyDataset, create_empty_dataset
from torchmn.data.global_sampler import EmptyBatchCollate, GlobalSampler
from torchmn.data.image_files import IMAGE_SETS, ImageData, default_data_root, load_images
from torchmn.data.scatter import scatter_dataset, scatter_index, shard_bounds
from torchmn.data.serial_iterator import SerialIterator
from torchmn.data.sub_dataset import SubDataset, split_dataset, split_dataset_n_random

__all__ = [
    "EmptyBatchCollate",
    "EmptyDataset",
    "GlobalSampler",
    "IMAGE_SETS",
    "ImageData",
    "SerialIterator",
    "SubDataset",
    "create_empty_dataset",
    "default_data_root",
    "load_images",
    "scatter_dataset",
    "scatter_index",
    "shard_bounds",
    "split_dataset",
    "split_dataset_n_random",
]
