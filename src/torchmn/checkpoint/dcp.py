"""Export to `torch.distributed.checkpoint` (DCP), for tools that read no other format."""

import inspect
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchmn.base.errors import DataError, UnsupportedError
from torchmn.base.private_files import make_private_folder, open_private
from torchmn.checkpoint.parts import nowhere, place_parts
from torchmn.checkpoint.reader import SavedCheckpoint
from torchmn.checkpoint.snapshot import RANDOM
from torchmn.checkpoint.storage import FolderStorage
from torchmn.checkpoint.writer import read_manifest


def export_dcp(checkpoint: str | Path, folder: str | Path) -> None:
    """Write the state of rank 0 in a checkpoint in the format of DCP. Local: call it on one rank.

    Sharded tensors are put together from the parts of all ranks and written whole.

    ``checkpoint`` is one folder such as ``checkpoints/cifar/step-00000100``. DCP pickles everything
    but tensors. As with checkpoints, only the user can read the files. Raises DataError: the
    checkpoint is damaged, or the folder cannot be written; UnsupportedError: with torch 2.6, if the
    script has a default process group.

    >>> import tempfile
    >>> from torchmn.checkpoint import export_dcp
    >>> model, folder = torch.nn.Linear(3, 1), tempfile.mkdtemp()
    >>> checkpointer = torchmn.create_multi_node_checkpointer(comm, folder, "net")
    >>> checkpointer.save(1, {"model": model})
    >>> checkpointer.finish()
    >>> checkpointer.export_dcp(f"{folder}/dcp")  # the newest; export_dcp() takes any
    """
    from torch.distributed.checkpoint import state_dict_saver as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

    class PrivateFiles(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
            with open(path, mode, opener=open_private) as stream:
                yield stream

    source = Path(checkpoint)
    storage = FolderStorage(source.parent)
    with SavedCheckpoint(storage, source.name, read_manifest(storage, source.name)) as saved:
        ranks = range(saved.manifest.world_size)
        state = {
            label: place_parts(
                saved.state_of(0, label), nowhere, saved.states_of(ranks, label), label
            )
            for label in saved.labels(0)
            if label != RANDOM
        }
    alone = _alone(dcp.save)
    try:
        make_private_folder(Path(folder))
        writer = FileSystemWriter(folder)
        writer.fs = PrivateFiles()  # DCP opens its files by it, else with the modes of the umask
        with warnings.catch_warnings():  # DCP warns that it saves in one process, as is intended
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
            dcp.save(state, storage_writer=writer, **alone)
    except (Exception, CheckpointException) as error:  # the latter is a BaseException only
        raise DataError(f"{folder} cannot be written by DCP: {_describe(error)}") from error


def _alone(save: Callable[..., Any]) -> dict[str, bool]:
    """The keyword arguments with which ``dcp.save`` writes on this rank alone.

    torch 2.6 has no such option, and writes alone if there is no default process group. Raises
    UnsupportedError: there is one, and all of its ranks would have to call ``dcp.save``.
    """
    if "no_dist" in inspect.signature(save).parameters:
        return {"no_dist": True}
    if torch.distributed.is_initialized():
        raise UnsupportedError(
            f"torch {torch.__version__} writes folders of DCP on all ranks of the default "
            "process group, which this script has initialized. Use a newer torch, or do "
            "it in a process without init_process_group()."
        )
    return {}


def _describe(error: BaseException) -> str:
    """The last line of an error's message: DCP puts whole tracebacks into its messages."""
    return next(reversed(str(error).strip().splitlines()), type(error).__name__).strip()
