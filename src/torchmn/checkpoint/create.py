"""`create_multi_node_checkpointer`: from arguments to a checkpointer on every rank."""

import grp
import secrets
import time
from pathlib import Path
from typing import Any

from torchmn.base.errors import (
    CheckpointWarning,
    DataError,
    UnsupportedError,
    UsageError,
    raise_if_no_count,
)
from torchmn.base.warn import warn
from torchmn.checkpoint.checkpointer import MultiNodeCheckpointer, OnFailure
from torchmn.checkpoint.control_channel import ControlChannel
from torchmn.checkpoint.folder_owner import FolderOwner
from torchmn.checkpoint.manifest import Best
from torchmn.checkpoint.storage import FolderStorage
from torchmn.checkpoint.writer import Writer
from torchmn.comm import Communicator, Grid
from torchmn.comm.collective_checks import raise_if_values_differ

_TOKEN = ".token-"
_VISIBILITY_LIMIT_S = 5.0  # network file systems cache absence for seconds


def create_multi_node_checkpointer(
    comm: Communicator | Grid,
    path: str | Path,
    name: str,
    *,
    keep: int = 3,
    best: Best | None = None,
    is_async: bool = True,
    check_replicas: bool = True,
    on_failure: OnFailure = "warn",
    group: str | None = None,
    read_only: bool = False,
) -> MultiNodeCheckpointer:
    """Keep checkpoints of all ranks in the folder ``path/name``. *Collective.*

    ```python
    checkpointer = torchmn.create_multi_node_checkpointer(comm, "checkpoints", "cifar")
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    for step in range(checkpointer.resume(state), num_steps):
        ...
        if (step + 1) % 100 == 0:
            checkpointer.save(step + 1, state)
    checkpointer.finish()
    ```
    With `Trainer`: ``trainer.extend(checkpointer, trigger=(1, "epoch"))``, then
    ``checkpointer.maybe_load(trainer)``. See docs/reference/checkpoint.md.

    Args:
        comm: the ranks that train together; where they hold parts of a model, their `Grid`, whose
            first axis is that of the replicas.
        path: a folder on a file system that all ranks see; it is created if it does not exist.
        name: the folder of this training in it. It belongs to one job at a time: see
            docs/reference/checkpoint.md#the-owner-of-a-folder.
        keep: how many of the last checkpoints are kept.
        best: a further checkpoint to keep: the best one.
        is_async: write while training continues.
        check_replicas: compare what must be the same on all ranks, by the checksums that a
            checkpoint needs anyway. A difference aborts the checkpoint and raises.
        on_failure: whether the next save raises or warns if a checkpoint could not be written.
        group: a group of users that may read the checkpoints; without it only this user may.
        read_only: only resume, also from checkpoints of a job that is running; `save` raises.

    Raises:
        UsageError: an argument is out of range, or another job owns the folder.
        RankMismatchError: ranks gave different arguments.
        DataError: the folder cannot be created or read.
        UnsupportedError: the ranks do not share the file system.

    Example:
        >>> import tempfile
        >>> folder, model = tempfile.TemporaryDirectory(), torch.nn.Linear(3, 1)
        >>> state = {"model": model}
        >>> checkpointer = torchmn.create_multi_node_checkpointer(comm, folder.name, "training")
        >>> checkpointer.resume(state)  # nothing is there yet
        0
        >>> checkpointer.save(100, state)
        >>> checkpointer.finish()
        >>> torchmn.create_multi_node_checkpointer(comm, folder.name, "training").resume(state)
        100
        >>> folder.cleanup()
    """
    grid = comm if isinstance(comm, Grid) else None
    comm = comm.comm if isinstance(comm, Grid) else comm
    _check(name, keep, best, check_replicas, on_failure)
    # The number is compared, too: hosts may give one name different numbers, and files of some
    # ranks would belong to another group.
    gid, problem = _gid_of(group)
    options = {"path": str(path), "name": name, "keep": keep, "best": repr(best), "group": group}
    options |= {"check_replicas": check_replicas, "on_failure": on_failure, "number of group": gid}
    options |= {"is_async": is_async, "read_only": read_only}
    raise_if_values_differ(
        f"{comm.rank_label}: ranks called create_multi_node_checkpointer()",
        comm.allgather_obj(options),
        "All ranks must give the same arguments.",
    )
    if problem is not None:
        raise UsageError(f"{comm.rank_label}: {problem}")
    where = Path(path).absolute() / name  # the working directory may change
    owner = None
    if not read_only:
        access = FolderStorage(where, gid=gid)
        if _is_writable(comm, access):
            owner = _own(comm, access)
    storage = FolderStorage(where, gid=gid, confirm=None if owner is None else owner.confirm)
    # Of its own: a background thread uses it while gradients are exchanged over the others.
    transport = comm.groups.new_transport("checkpoint") if comm.size > 1 else None
    channel = ControlChannel(
        transport, comm.rank_label, comm.timeout_s, recorder=comm.flight_recorder.for_other_thread()
    )
    writer = Writer(
        comm=comm,
        storage=storage,
        channel=channel,
        keep=keep,
        best=best,
        grid={} if grid is None else grid.sizes,
    )
    return MultiNodeCheckpointer(
        comm,
        writer,
        is_async=is_async,
        checks_replicas=check_replicas,
        on_failure=on_failure,
        owner=owner,
        read_only=read_only,
        grid=grid,
    )


def _check(name: str, keep: int, best: object, check_replicas: object, on_failure: object) -> None:
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UsageError(
            f"name={name!r} must be the name of a folder, without '/'. Folders above it belong "
            "into path."
        )
    raise_if_no_count("keep", keep, "a number of checkpoints")
    if best is not None and not isinstance(best, Best):
        raise UsageError(f"best={best!r} must be a torchmn.checkpoint.Best, or None.")
    if check_replicas not in (True, False):
        raise UsageError(f"check_replicas={check_replicas!r} must be True or False.")
    if on_failure not in ("warn", "raise"):
        raise UsageError(f"on_failure={on_failure!r} must be 'warn' or 'raise'.")


def _gid_of(group: str | None) -> tuple[int | None, str | None]:
    """Look up a group of users; return (gid, None), (None, None) or (None, problem)."""
    if group is None:
        return None, None
    try:
        return grp.getgrnam(group).gr_gid, None
    except (KeyError, TypeError):
        return None, f"group={group!r} must be the name of a group of users, or None."


def _own(comm: Communicator, access: FolderStorage) -> FolderOwner | None:
    """Make this job the owner of the folder; return rank 0's `FolderOwner`. *Collective.*

    Rank 0 watches for another owner's heartbeat in short turns: meanwhile the other ranks wait in a
    broadcast, which has a time limit.
    """
    owner = FolderOwner(access.folder, access.make_file) if comm.rank == 0 else None
    while True:
        answer = "owned", ""
        if owner is not None:
            try:
                # Shorter than the time limit of the broadcast in which the other ranks wait.
                answer = owner.attempt(comm.timeout_s / 4)
            except OSError as error:
                text = f"{error.filename or access.folder}: {error.strerror or error}"
                answer = "refused", f"the folder for checkpoints cannot be owned: {text}."
        state, text = comm.bcast_obj(answer)
        if state == "refused":
            raise UsageError(f"{comm.rank_label}: {text}")
        if text and comm.rank == 0:
            warn(f"{comm.rank_label}: {text}", CheckpointWarning)
        if state == "owned":
            return owner


def _is_writable(comm: Communicator, access: FolderStorage) -> bool:
    """Return whether rank 0 can write to the folder, which all ranks must see. *Collective.*

    If it cannot write but read, existing checkpoints can still be resumed from: rank 0 warns.
    """
    where = access.folder
    token, problem, is_readable = f"{_TOKEN}{secrets.token_hex(8)}", None, True
    if comm.rank == 0:
        try:
            access.make_folder(where, parents=True)
            for old in where.glob(f"{_TOKEN}*"):  # of jobs that were killed during this check
                old.unlink(missing_ok=True)
            # A new file and not the folder: each host may have a local folder of this name.
            access.make_file(where / token, b"")
        except OSError as error:
            problem = f"{error.filename or where}: {error.strerror} (errno {error.errno})"
            is_readable = where.is_dir()
    from_root: Any = comm.bcast_obj((token, problem, is_readable))
    token, problem, is_readable = from_root
    if problem is not None and not is_readable:
        raise DataError(
            f"{comm.rank_label}: the folder for checkpoints cannot be created: {problem}."
        )
    if problem is not None:
        if comm.rank == 0:
            warn(
                f"{comm.rank_label}: no checkpoint can be written: {problem}. Existing checkpoints "
                "can be read.",
                CheckpointWarning,
            )
        return False
    seen = comm.allgather_obj(_sees(where / token, comm))
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if comm.rank == 0:
        (where / token).unlink(missing_ok=True)
    if blind:
        hosts = sorted({comm.topology.hosts[rank] for rank in blind})
        raise UnsupportedError(
            f"{comm.rank_label}: ranks {blind} on {', '.join(hosts)} do not see {where}, which "
            "rank 0 has created. Checkpoints need a folder on a file system that all hosts share: "
            "each rank writes a part, and on another number of ranks reads the parts of others."
        )
    return True


def _sees(token: Path, comm: Communicator) -> bool:
    """Whether a file of rank 0 appears on this host within some seconds. Local."""
    deadline_s = time.monotonic() + min(_VISIBILITY_LIMIT_S, comm.timeout_s / 2)
    while not token.exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True
