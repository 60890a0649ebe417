"""A communication hook for torch's DistributedDataParallel (DDP) that uses any codec.

For each bucket, as soon as DDP has filled it, on W ranks:

    g_i <- g_i / W;     g <- sum over ranks of the encoded g_i      (`torchmn.comm.allreduce`)

and at the end of backward `Codec.finish`, once. The sums run on the communicator's engine,
overlapped with backward, over separate connections: they never interleave with DDP's own
collectives.

Differences from the hooks of torch.distributed.algorithms: residuals are kept by the parameter's
name, so that they survive when DDP rebuilds its buckets after the first step (torch's PowerSGD hook
lost them there); they are part of the state, and a step whose gradients are not finite leaves them
unchanged; all ranks decode the same bytes, so replicas stay bit-identical.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchmn.base import events
from torchmn.base.compiling import not_compiled
from torchmn.base.errors import RankMismatchError, UnsupportedError, UsageError
from torchmn.base.names import CodecName
from torchmn.base.torch_private import GradBucket, PrefixStore, store_of
from torchmn.cluster import Topology
from torchmn.cluster.gpus import may_share_gpus, shared_gpu_problem
from torchmn.comm import Communicator
from torchmn.comm.allreduce import ReduceBlock
from torchmn.comm.codecs import Codec, Layout
from torchmn.comm.engine import Work
from torchmn.comm.object_codec import Trust
from torchmn.comm.routes.flat import FlatRoute
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.exchange.buckets import shape_in_memory
from torchmn.exchange.codec_state import (
    codec_state,
    load_codec_state,
    own_codec,
    warn_if_it_encodes_nothing,
)
from torchmn.exchange.finiteness import NonfiniteGradients, gather_nonfinite
from torchmn.exchange.first_forward import watch_first_forward
from torchmn.exchange.model_hooks import ModelHooks
from torchmn.exchange.optimizer.recorded_steps import emit_forward
from torchmn.exchange.parameter_hook import owners_of
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.resharding import reshard_codec


class DdpHook:
    """A communication hook created by `ddp_hook`, for one model until `close`."""

    def __init__(
        self, codec: CodecName | Codec | None, comm: Communicator | None, *, timeout_s: float
    ) -> None:
        self.__name__ = self.__qualname__ = "ddp_hook"  # DDP reads both, as of a function
        self.nonfinite: list[NonfiniteGradients] = []
        """The passes in which a codec met nonfinite gradients; the same on all ranks."""
        self._asked = codec
        self._comm = comm
        self._is_own_comm = comm is None
        self._timeout_s = timeout_s
        self._codec: Codec | None = None
        self._names: dict[Tensor, str] = {}
        self._is_named = False
        self._is_open = False
        self._works: list[Work[None]] = []
        self._futures: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self._num_passes = 0
        self._was_finite = True
        # Names of parameters of which a codec encoded, and decoded, nonfinite values.
        self._seen: tuple[list[str], list[str]] = ([], [])
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._hooks = ModelHooks()

    # ---- before training, and after ----

    def register(self, model: DistributedDataParallel) -> DdpHook:
        """Exchange the gradients of ``model`` from now on; returns this hook. *Collective.*

        Raises UsageError: the model is not a DDP model, or the hook has one already;
        UnsupportedError: the route cannot carry the codec; RankMismatchError: ranks request
        different codecs.
        """
        if not isinstance(model, DistributedDataParallel):
            raise UsageError(
                f"ddp_hook() is for DistributedDataParallel, but got {type(model).__name__}. Other "
                "models are trained with create_multi_node_optimizer."
            )
        if self._is_open:
            raise UsageError("This hook serves a model already. Make another with ddp_hook().")
        if any(isinstance(o, GradientReducer) for o in owners_of(model.parameters())):
            raise UsageError(
                "A multi-node optimizer exchanges the gradients of this model already, and they "
                "would be averaged twice. Use one of the two: close() the optimizer, or give it "
                "the module without DistributedDataParallel."
            )
        self._open(model, next(model.module.parameters()).device)
        watch_first_forward([model])
        if events.observers:
            emit_forward([model], self._hooks)
        self._warm_up()
        # The state stays None: DDP keeps it in C++, and with the model in it neither would be
        # freed.
        model.register_comm_hook(None, self)
        return self

    @property
    def communicator(self) -> Communicator:
        """The communicator of the exchange. Raises UsageError: there is none yet."""
        if self._comm is None:
            raise UsageError("This hook serves no model yet. Call register(model) first.")
        return self._comm

    @property
    def codec(self) -> Codec | None:
        """The codec of this model, with its residuals; None sends float32."""
        return self._codec

    def state_dict(self) -> dict[str, Any]:
        """Return the codec's state on this rank; save it on every rank. Local.

        It has the form of ``optimizer.state_dict()["torchmn"]["codec"]``.
        """
        self._raise_if_nameless()
        return codec_state(self._codec, self.communicator)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the `state_dict` of the same rank; an empty dict starts from scratch."""
        self._raise_if_nameless()
        load_codec_state(self._codec, self.communicator, state)

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """Return the state that this rank loads, from those of all old ranks in order. Local."""
        return reshard_codec(states, self.communicator)

    def close(self) -> None:
        """Close the connections, unless the communicator was given. Local.

        The model can no longer be trained.
        """
        self._hooks.remove()
        if self._comm is not None and self._is_own_comm:
            self._comm.finalize()

    def _open(self, model: object, device: torch.device) -> None:
        """Connect to the other ranks. *Collective.*

        If ``model`` is not a DDP model, parameters are known by numbers instead of names.
        """
        group: Any = None  # the default one
        if isinstance(model, DistributedDataParallel):
            group = model.process_group
            self._names = {parameter: name for name, parameter in model.module.named_parameters()}
            self._is_named = True
        comm = self._comm if self._comm is not None else _connect(group, device, self._timeout_s)
        if (comm.rank, comm.size) != (dist.get_rank(group), dist.get_world_size(group)):
            raise UsageError(
                f"{comm.rank_label}: the model's process group has this rank as "
                f"{dist.get_rank(group)} of {dist.get_world_size(group)}. Give a communicator of "
                "the same ranks in the same order, or none."
            )
        self._codec, self._comm = own_codec(self._asked, comm), comm
        warn_if_it_encodes_nothing(self._codec, comm)
        asked = comm.allgather_obj(self._codec.name if self._codec is not None else None)
        if len(set(asked)) > 1:
            raise RankMismatchError(
                f"{comm.rank_label}: the ranks ask for different codecs: "
                + ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(asked))
                + "."
            )
        self._is_open = True

    def _raise_if_nameless(self) -> None:
        if not self._is_named:
            raise UsageError(
                "Residuals are saved by the names of parameters, which this hook does not know. "
                "Call ddp_hook(codec).register(model) instead of "
                "model.register_comm_hook(None, hook)."
            )

    def _warm_up(self) -> None:
        """Compile the codec's kernels now, so that no step has to."""
        if self._codec is None or self.communicator.size == 1:
            return
        largest: dict[torch.dtype, tuple[str, Tensor]] = {}
        for parameter, name in self._names.items():
            known = largest.setdefault(_real(parameter.dtype), (name, parameter))
            if parameter.numel() > known[1].numel():
                largest[_real(parameter.dtype)] = (name, parameter)
        for dtype, (name, parameter) in largest.items():
            layout = Layout.of([(name, 0, shape_in_memory(parameter))], dtype)
            self._codec.warm_up(layout, parameter.device)

    def _forget_buckets(self) -> None:
        """Release the memory for messages, as DDP has rebuilt its buckets after the first step."""
        self._algorithm = self.communicator.route.allreduce_algorithm(self._codec)
        self._layouts = {}

    # ---- during backward ----

    @not_compiled
    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the sum of a bucket that DDP has filled; after the last bucket, wait for all.

        Called by DDP in backward. Waiting here, and not in the futures, raises our error to the
        user instead of one of C++.
        """
        for observer in events.observers:
            observer.phase("backward", begins=True)
        buffer = bucket.buffer()
        if not self._is_open:
            self._open(state, buffer.device)
        comm = self.communicator
        future = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else None)
        if comm.size == 1:
            future.set_result(buffer)
            return future
        block = self._block(bucket, buffer)
        block.buffer.mul_(1 / comm.size)
        self._futures.append((future, buffer))
        job = comm.route.sum_job(
            block,
            self._algorithm,
            bucket=bucket.index(),
            step=self._num_passes,
            on_complete=self._finish if bucket.is_last() else None,
        )
        if not bucket.is_last():
            self._works.append(comm.engine.submit(job))
            return future
        comm.engine.call(job)
        for work in self._works:
            work.wait()
        self._note_nonfinite()
        for done, mean in self._futures:
            done.set_result(mean)
        self._works.clear()
        self._futures.clear()
        self._num_passes += 1
        return future

    # DDP compares annotations with these objects; the future import makes them strings.
    __call__.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}

    def _block(self, bucket: GradBucket, buffer: Tensor) -> ReduceBlock:
        parameters = bucket.parameters()
        names = tuple(self._name(parameter) for parameter in parameters)
        if buffer.layout != torch.strided:
            raise UnsupportedError(
                f"{self.communicator.rank_label}: the gradient of '{names[0]}' is sparse. Only "
                "dense gradients are exchanged: make the layer with sparse=False."
            )
        real = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        layout = self._layouts.get(names)
        if layout is None:
            if bucket.index() == 0:
                self._forget_buckets()
            per_element = 2 if buffer.is_complex() else 1
            starts = (
                int(gradient.storage_offset() - buffer.storage_offset()) * per_element
                for gradient in bucket.gradients()
            )
            layout = self._layouts[names] = Layout.of(
                zip(names, starts, map(shape_in_memory, parameters), strict=True), real.dtype
            )
        return ReduceBlock(real, layout)

    def _name(self, parameter: Tensor) -> str:
        name = self._names.get(parameter)
        if name is None and not self._is_named and self._num_passes == 0:
            # Buckets and what is in them come in the same order on all ranks.
            name = self._names[parameter] = f"parameter {len(self._names)}"
        if name is None:
            raise UsageError(
                f"{self.communicator.rank_label}: a parameter of shape {list(parameter.shape)} was "
                "added to the model after this hook was registered, or the hook was given to two "
                "models. Build the model first, and make a hook for each."
            )
        return name

    def _finish(self) -> None:
        """Let the codec finish, after the last sum of a pass. Called inside the engine's job."""
        codec = self._codec
        if codec is None:
            return
        found = codec.nonfinite
        self._seen = found.names("encoding"), found.names("decoding")
        # Ranks of one group agree, as each decodes what the others encoded. But a leader that is
        # alone in its group decodes nothing and has seen only what it encoded.
        self._was_finite = bool(self.communicator.route.all_valid(not any(self._seen)))
        codec.finish(is_valid=self._was_finite)

    def _note_nonfinite(self) -> None:
        if self._was_finite:
            return
        self._was_finite = True
        self.nonfinite.append(
            gather_nonfinite(self.communicator, self._num_passes, [], *self._seen)
        )


def ddp_hook(
    codec: CodecName | Codec | None, *, comm: Communicator | None = None, timeout_s: float = 60
) -> DdpHook:
    """Create a communication hook for DistributedDataParallel that uses any codec. Local.

    ``torchmn.ddp_hook("1bit").register(model)`` after ``model`` was wrapped; nothing else
    of the script changes. ``no_sync()``, ``join()``, unused parameters and GradScaler work as DDP
    has them. ``model.register_comm_hook(None, ddp_hook("1bit"))`` does the same among all ranks of
    the default process group; the residuals cannot be saved then.

    Args:
        codec: a name of `torchmn.compression.CODECS` or an object; None is float32.
        comm: a communicator of the same ranks in the same order, whose route and transport are
            then used; by default all ranks of the model's process group exchange with each other,
            over gloo for CPU tensors and NCCL for CUDA tensors.
        timeout_s: the limit of every single collective in seconds, if ``comm`` is not given.

    CUDA tensors are exchanged the same way, which was tested on one GPU, not on several yet.

    Raises UsageError: ``timeout_s`` is not positive.

    Example:
        >>> hook = torchmn.exchange.optimizer.ddp_hook("1bit")  # then hook.register(model)
    """
    if not timeout_s > 0:
        raise UsageError(f"timeout_s={timeout_s} must be a positive number of seconds.")
    return DdpHook(codec, comm, timeout_s=timeout_s)


def _connect(group: Any, device: torch.device, timeout_s: float) -> Communicator:
    """Create a communicator of the ranks of a process group, through its store. *Collective.*"""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    default: Any = dist.group.WORLD
    shared = store_of(group if group is not None else default)
    # Each rank counts its own hooks: they are created in one order, so that the numbers agree.
    number = shared.add(f"torchmn/ddp_hooks_of/{rank}", 1)
    store = PrefixStore(f"torchmn/ddp_hook{number}", shared)
    cuda_device = device if device.type == "cuda" else None
    gpu = "" if cuda_device is None else torch.cuda.get_device_properties(cuda_device).uuid
    store.set(f"rank{rank}", f"{socket.gethostname()} {gpu}")
    found = [store.get(f"rank{peer}").decode().split(" ") for peer in range(size)]
    hosts = tuple(host for host, _ in found)
    num_gpus = len({gpu for _, gpu in found})
    transport = TorchDistributedTransport(
        store,
        rank,
        size,
        timeout_s=timeout_s,
        cuda_device=cuda_device,
        supports_nccl=not shared_gpu_problem(size, num_gpus, may_share=may_share_gpus(os.environ)),
    )
    return Communicator(
        FlatRoute, transport, Topology(hosts), device=device, timeout_s=timeout_s, trust=Trust()
    )


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
