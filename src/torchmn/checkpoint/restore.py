"""Restoring a rank from its own saved state, or from those of another number of ranks."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.errors import UsageError
from torchmn.checkpoint.manifest import Manifest
from torchmn.checkpoint.parts import place_parts, targets_of
from torchmn.checkpoint.reader import SavedCheckpoint
from torchmn.checkpoint.snapshot import RANDOM, HasReplicatedTensors, Stateful
from torchmn.comm import Communicator, Grid
from torchmn.comm.grid import num_model_parts
from torchmn.comm.local_tensors import is_divided
from torchmn.data import rank_seeds, rng_state
from torchmn.data.batch_settings import batch_settings_by_name
from torchmn.data.scatter import warnings_of_shards
from torchmn.exchange.replicas import parameters_of
from torchmn.exchange.resharding import (
    Resharding,
    for_other_split,
    raise_if_other_optimizer,
    warnings_of,
)


class RestoreOperation:
    """Resumes from one checkpoint: `read` reads and checks everything, `load` loads it. Local."""

    def __init__(self, comm: Communicator, manifest: Manifest, grid: Grid | None = None) -> None:
        self._comm = comm
        self._manifest = manifest
        self._num_parts = 1 if grid is None else num_model_parts(grid.sizes)
        # The ranks that hold the same part of the model as this one.
        self._replicas = comm if grid is None else grid.replicas
        self._is_same_size = True
        self._states: dict[str, Any] = {}
        self._old_states: dict[str, list[Any]] = {}
        self._random: Any = None
        self._unread: list[str] = []

    def read(self, saved: SavedCheckpoint, state: Mapping[str, Stateful]) -> None:
        """Read what these objects load.

        Raises DataError: the checkpoint is damaged; UsageError: it does not fit these objects.
        """
        comm, num_old = self._comm, self._manifest.world_size
        num_old_parts = num_model_parts(saved.grid())
        is_same_split = num_old_parts == self._num_parts
        self._is_same_size = num_old == comm.size and is_same_split
        # A grid's first axis is that of the replicas, so rank % parts is the part of the model.
        part = comm.rank % num_old_parts if is_same_split else 0
        old_replicas = range(part, num_old, num_old_parts)
        source = comm.rank if self._is_same_size else part
        labels = saved.labels(source)
        if missing := [label for label in state if label not in labels]:
            raise UsageError(
                f"{comm.rank_label}: {saved.name} was saved without {', '.join(missing)}; it has "
                f"{', '.join(label for label in labels if label != RANDOM)}. Use the same names."
            )
        self._unread = [label for label in labels if label not in state and label != RANDOM]
        if not self._is_same_size and num_old_parts == 1:
            _raise_if_divided(state, f"{comm.rank_label}: {saved.name}", num_old)
        shared: dict[str, Tensor] = {}
        for label, obj in state.items():
            if is_same_split and not self._is_same_size and isinstance(obj, Resharding):
                self._old_states[label] = [
                    saved.state_of(rank, label, shared) for rank in old_replicas
                ]
            else:
                if not is_same_split:
                    saved.raise_if_ranks_differ(label, range(num_old_parts))
                self._states[label] = place_parts(
                    saved.state_of(source, label),
                    targets_of(obj),
                    saved.states_of(range(num_old), label),
                    label,
                )
                if not is_same_split:
                    self._states[label] = for_other_split(self._states[label], label)
            if isinstance(obj, Optimizer):
                theirs = self._old_states.get(label, [self._states.get(label)])[0]
                raise_if_other_optimizer(obj, theirs, saved.optimizer_of(source, label))
        self._random = saved.state_of(comm.rank if comm.rank < num_old else 0, RANDOM)
        # Loading changes objects one by one. What is wrong must be found before that, while all
        # ranks can still reject the checkpoint.
        rng_state.check(self._random)

    def load(self, state: Mapping[str, Stateful]) -> Exception | None:
        """Load what was read, random generators last; return the first error, or None.

        On another number of ranks, objects that reshard are loaded after the others: an optimizer
        in the middle of a block replaces the parameters that the model has loaded.
        """
        comm = self._comm
        try:
            for label, obj in sorted(state.items(), key=lambda item: item[0] in self._old_states):
                if isinstance(obj, Resharding) and label in self._old_states:
                    old = self._old_states.pop(label)
                    theirs = obj.reshard_state_dict(old, self._replicas)
                    theirs = place_parts(theirs, targets_of(obj), (), label)
                else:
                    theirs = self._states.pop(label)
                obj.load_state_dict(theirs)
            # Last, since `load_state_dict` of an object may draw random numbers.
            rank_seeds.restore(self._random, self._manifest.step, comm, self._manifest.world_size)
        except Exception as error:  # reported to the other ranks before it is raised
            return error
        return None

    def notes(self, state: Mapping[str, Stateful]) -> list[str]:
        """Warnings about what this restore leaves out or changes."""
        notes = []
        if self._unread:
            notes.append(
                f"the checkpoint also has {', '.join(self._unread)}, which was not requested."
            )
        if not self._is_same_size:
            for obj in state.values():
                notes += warnings_of(obj)
            notes += warnings_of_shards(self._comm)
        for label, own in batch_settings_by_name(state).items():
            saved = self._manifest.batches.get(label)
            note = None if saved is None else own.warning_after(saved, self._manifest.step)
            notes += [note] if note else []
        return list(dict.fromkeys(notes))


def _raise_if_divided(state: Mapping[str, Stateful], what: str, num_old: int) -> None:
    """Raise UsageError: an object has parallel layers, and was saved without a grid."""
    for label, obj in state.items():
        if any(map(is_divided, _tensors_of(obj))):
            raise UsageError(
                f"{what} was saved by {num_old} ranks without a grid, and '{label}' has layers "
                "that are divided among ranks, of which each would load rank 0's part. Resume as "
                "it was saved, and save with create_multi_node_checkpointer(grid, ...), or save "
                "what torchmn.nn.gather_state_dict returns."
            )


def _tensors_of(obj: Stateful) -> Iterable[Tensor]:
    """The tensors of a model, an optimizer or a trainer; none for other objects. Local."""
    if isinstance(obj, nn.Module):
        return obj.parameters()
    if isinstance(obj, Optimizer):
        return parameters_of(obj)
    return obj.replicated_tensors() if isinstance(obj, HasReplicatedTensors) else ()
