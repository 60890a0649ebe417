"""Asynchronous training: workers push gradients to servers and pull parameters independently.

    worker i, step t:   g = gradient of its own batch at w_i
                        push g to all servers; each applies it at once:  w <- update(w, g)
                        pull w_i <- w, when at most s steps ahead of the slowest live worker

Servers are threads of the ranks: every rank owns a shard of the parameters and of the optimizer
state (``servers="all"``), or only the last k ranks do, and do not train (``servers=k``).

Sources: bounded staleness: Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server", NIPS 2013; servers: M. Li et al., OSDI 2014; delay compensation: S.
Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017 (with a
constant lambda). CNTK's DataParallelASGD over Multiverso differs: its workers updated locally and
pushed differences of models, with no bound on staleness, no momentum at the servers, and its own
learning rate schedule. Here gradients are pushed, each push is one update by the user's optimizer
at the server, with the worker's hyper-parameters at that step; a shard holds whole parameters.
"""

import atexit
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from torchmn.base import events
from torchmn.base.errors import RankMismatchError, UnsupportedError, UsageError
from torchmn.base.torch_private import STEP_HOOKS
from torchmn.base.warn import warn
from torchmn.comm.codecs import StripeCodec
from torchmn.comm.engine import Engine, Work
from torchmn.comm.transports.base import abort_pending_receives
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.finiteness import NonfiniteGradients
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.replicas import parameters_of
from torchmn.exchange.schedules.base import Schedule, Traits
from torchmn.exchange.schedules.changed_parameters import ParameterSample
from torchmn.exchange.schedules.parameter_server.messages import (
    Messages,
    ServerClient,
    WorkerThread,
)
from torchmn.exchange.schedules.parameter_server.server import Reply, ShardServer
from torchmn.exchange.schedules.parameter_server.shards import (
    ShardMemory,
    assign_shards,
    device_copy,
    hyper_parameters,
)
from torchmn.exchange.schedules.parameter_server.staleness import Staleness, StalenessRecord, report

_GRACE_S = 2.0


class ParameterServer(Schedule):
    """The schedule ``parameter_server``: servers own the parameters, workers train asynchronously.

    Args:
        servers: ``"all"``: all ranks serve and train; a number: the last ``servers`` ranks serve
            and do not train.
        max_staleness: no worker begins a step more than this many steps ahead of the slowest live
            one. 0 is synchronous, though updates are applied one after another.
        pipeline: compute the next gradient while the last one is pushed and parameters are pulled.
            The parameters are then one step older, which counts as staleness: ``max_staleness``
            must be at least 1.
        delay_compensation: lambda of the term lambda * g * g * (w - w_pulled); 0 adds none. The
            servers then keep a copy of the parameters that each worker has pulled.

    Raises UsageError: an argument is out of range.

    Example:
        >>> ParameterServer(max_staleness=4).name
        'parameter_server'
    """

    # No p.grad is stale: it is the rank's own. `staleness` tells how old the parameters are.
    traits = Traits(
        name="parameter_server",
        num_sets=0,
        takes_shards=False,
        averages_gradients=False,
        has_own_steps=True,
        replica_consistency="none",
    )
    _server_class: type[ShardServer] = ShardServer

    def __init__(
        self,
        servers: int | Literal["all"] = "all",
        *,
        max_staleness: int = 4,
        pipeline: bool = False,
        delay_compensation: float = 0.0,
    ) -> None:
        if servers != "all" and (not isinstance(servers, int) or servers < 1):
            raise UsageError(f"servers={servers!r} must be 'all' or a positive number of ranks.")
        if max_staleness < int(pipeline):
            raise UsageError(
                f"max_staleness={max_staleness} with pipeline={pipeline}: it must not be negative, "
                "and a pipeline needs at least 1, for its gradients are one step old."
            )
        if not 0 <= delay_compensation < float("inf"):
            raise UsageError(f"delay_compensation={delay_compensation} must be 0 or positive.")
        self.servers = servers
        self.max_staleness = max_staleness
        self.pipeline = pipeline
        self.delay_compensation = delay_compensation
        self.versions: dict[int, int] = {}
        """The version of each server's parameters that this rank last pulled. Only increases."""
        self.lost: set[int] = set()
        """Ranks that died or left early; training continued without them."""
        self._updates_late: Counter[int] = Counter()
        self._max_steps_ahead = 0
        self._reported: dict[int, StalenessRecord] = {}
        self._work: Work[dict[int, Any]] | None = None
        self._episode = 0
        self._clock = 0
        self._is_open = False
        self._is_finished_by_join = False
        self._is_closed = False
        self._had_gradients: set[str] = set()
        """Names of parameters of which a gradient was ever pushed."""
        self._server: ShardServer | None = None
        self._threads: list[WorkerThread] = []

    def __repr__(self) -> str:
        text = (
            f"ParameterServer(servers={self.servers!r}, max_staleness={self.max_staleness}, "
            f"pipeline={self.pipeline}, delay_compensation={self.delay_compensation})"
        )
        staleness = self.staleness()
        return f"{text}\n{staleness}" if staleness.workers else text

    def staleness(self) -> Staleness:
        """The staleness so far: of this worker until now, of all others until the last flush."""
        own = self._updates_late, self._max_steps_ahead
        return report(self.max_staleness, self._reported | {self._comm.rank: own})

    # ---- life ----

    def attach(
        self, reducer: GradientReducer, inner: Optimizer, models: Sequence[nn.Module]
    ) -> None:
        """See `Schedule.attach`. Raises UnsupportedError: see `_raise_if_unsupported`."""
        super().attach(reducer, inner, models)
        comm = self._comm
        self._raise_if_unsupported()
        options = comm.allgather_obj(repr(self))
        if len(set(options)) > 1:
            raise RankMismatchError(
                f"{comm.rank_label}: ranks have different parameter servers: "
                f"{sorted(set(options))}. Pass the same arguments on all ranks."
            )
        num_servers = comm.size if self.servers == "all" else self.servers
        servers = list(range(comm.size - num_servers, comm.size))
        serves = self.servers != "all" and comm.rank in servers
        self.traits = replace(self.traits, serves=serves)
        self._parameters = list(reducer.parameters.trained())
        shards = dict(zip(servers, assign_shards(self._parameters, num_servers), strict=True))
        self._memory = {server: ShardMemory(shard) for server, shard in shards.items()}
        self._places: list[tuple[int, str, nn.Parameter, Tensor]] = [
            (server, name, parameter, self._memory[server].slots[name])
            for server, shard in shards.items()
            for name, parameter in shard
        ]
        self._known = ParameterSample(self._parameters)
        codec = reducer.codec
        self._codec = codec if isinstance(codec, StripeCodec) else None
        if self._codec is not None:
            for layout in {
                ly.dtype: ly for m in self._memory.values() for ly in m.layouts
            }.values():
                self._codec.warm_up(layout, torch.device("cpu"))
        # A transport of its own: servers and workers send at any time, from several threads, while
        # the collectives of the communicator keep one order.
        transport = comm.groups.new_transport("servers")
        self._messages = Messages(transport, comm.timeout_s, comm.trust)
        if comm.rank in servers:
            self._start_server(shards[comm.rank])
        self._client = ServerClient(
            self._messages, self._memory, self._server, self._codec, comm.rank, comm.rank_label
        )
        self._engine = Engine(torch.device("cpu"))
        self._forget_close = comm.on_finalize(self.close)
        # At exit the threads must end before the interpreter does, and before MPI is finalized.
        atexit.register(self.close)

    def _start_server(self, shard: list[NamedParameter]) -> None:
        comm = self._comm
        self._server = self._server_class(
            comm.rank,
            shard,
            self._inner,
            comm.size,
            max_staleness=self.max_staleness,
            lead=int(self.pipeline),
            delay_compensation=self.delay_compensation,
            timeout_s=comm.timeout_s,
        )
        self._threads = [
            WorkerThread(self._server, worker, self._messages, self._codec)
            for worker in range(comm.size)
            if worker != comm.rank
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Disconnect from all servers and stop this rank's own. Local; may be called again.

        Waits up to two seconds for the other ranks to disconnect as well.
        """
        if self._is_closed:
            return
        self._is_closed, groups = True, self._comm.groups
        atexit.unregister(self.close)
        self._forget_close()
        is_stuck = self._work is not None and not self._work.done
        # Stuck: an error ended the loop while a request still waits for its responses. The client
        # serves one thread at a time, so it cannot send another message then.
        if not is_stuck:
            self._client.leave(_GRACE_S)
        if self._server is not None:
            self._server.close(f"{self._comm.rank_label} has ended its training.")
        deadline = time.monotonic() + (0.0 if is_stuck else _GRACE_S)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        transport = self._messages.transport
        if is_stuck or any(thread.is_alive() for thread in self._threads):
            for thread in self._threads:
                thread.end()
            abort_pending_receives(transport)
            # A thread that returns from a wait in C++ while the interpreter exits would kill the
            # process by a signal. Now that their receives are aborted, all of them return.
            for thread in self._threads:
                thread.join(5 * _GRACE_S)
        self._engine.close()
        self._client.close()
        if not any(t.is_alive() for t in self._threads):
            groups.close_transport(transport)

    # ---- a step ----

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`: gradients stay this rank's own until `step`."""

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """See `Schedule.step`. Local, except that it waits if this worker is too far ahead.

        Hooks of the inner optimizer's step are called here, around the push. A gradient that is
        not finite is never sent to the servers, whatever ``on_nonfinite`` is. Raises UsageError:
        the script has changed parameters since the last step, which servers would not notice.
        """
        if not self._reducer.is_active:  # it has left its loop, or only serves
            self._finish()
            self._is_finished_by_join = True  # join() also calls flush()
            self._exchange.num_active = 0
            return None
        self._raise_if_misused(closure)
        self._raise_if_changed()
        self._collect()
        nonfinite = [name for _, name, p, _ in self._places if not _is_finite(p.grad)]
        self._act_on(nonfinite)
        fields = dict.fromkeys(self._memory, {}) if nonfinite else self._pack()
        if not nonfinite and (nonfinite := self._client.encode()):  # beyond the codec's range
            self._act_on(nonfinite)
        self._open()
        self._clock += 1
        kind = "skip" if nonfinite else "push"
        place = {"episode": self._episode, "clock": self._clock}
        requests = {server: {**place, **own} for server, own in fields.items()}
        if self.pipeline:
            self._work = self._engine.submit(lambda: self._client.request(kind, requests))
        else:
            with events.during("exchange"):
                replies = self._client.request(kind, requests)
            self._pulled(replies)
        self._call_hooks(STEP_HOOKS[1])
        return None

    def _pack(self) -> dict[int, dict[str, Any]]:
        """Copy the gradients into the memory of each push; returns its metadata by server."""
        zero_fill, codec = self._exchange.zero_fill, self._codec
        keeps_residuals = codec is not None and codec.keeps_residuals
        metadata: dict[int, dict[str, Any]] = {server: {} for server in self._memory}
        is_waiting = False
        for server, name, parameter, slot in self._places:
            grad = parameter.grad
            # Zeros are pushed as well if the codec may hold a residual, which is sent with them.
            counts_as_zeros = zero_fill or (keeps_residuals and name in self._had_gradients)
            if grad is None and parameter.requires_grad and counts_as_zeros:
                slot.zero_()
            elif grad is None:
                slot.zero_()
                metadata[server].setdefault("absent", []).append(name)
            elif grad.layout != torch.strided:
                raise UnsupportedError(
                    f"{self._comm.rank_label}: the gradient of '{name}' is sparse ({grad.layout}). "
                    "Only dense gradients are pushed: make the layer with sparse=False."
                )
            else:
                self._had_gradients.add(name)
                slot.copy_(grad.detach(), non_blocking=True)
                is_waiting = is_waiting or grad.is_cuda
        # Servers and codecs read this host memory: the queued copies must have arrived.
        if is_waiting:
            torch.cuda.current_stream().synchronize()
        hyper = hyper_parameters(self._inner)
        return {server: {**fields, "hyper": hyper} for server, fields in metadata.items()}

    def _collect(self) -> None:
        """Wait for the pending push and install the parameters that were pulled."""
        if self._work is not None:
            work, self._work = self._work, None
            self._pulled(work.wait())

    def _pulled(self, replies: Mapping[int, Reply]) -> None:
        """Install the result of a push and record its staleness."""
        self._install(replies)
        self._updates_late[max(reply.num_updates_late for reply in replies.values())] += 1
        ahead = (reply.num_steps_ahead for reply in replies.values())
        self._max_steps_ahead = max(self._max_steps_ahead, *ahead)

    def _install(self, replies: Mapping[int, Reply]) -> None:
        """Copy the pulled values into the parameters."""
        with torch.no_grad():
            for _, _, parameter, slot in self._places:
                parameter.copy_(slot)
        self._known.note()
        for server, reply in replies.items():
            self.versions[server] = reply.version
        lost = {worker for reply in replies.values() for worker in reply.lost} - self.lost
        if lost:
            self.lost |= lost
            warn(
                f"{self._comm.rank_label}: rank {', '.join(map(str, sorted(lost)))} is lost. "
                "Training continues without it.",
            )

    def _raise_if_changed(self) -> None:
        """Raise UsageError if the script has changed parameters since they were pulled. Local."""
        if not self._is_open:
            return
        changed = self._known.changed()
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise UsageError(
                f"{self._comm.rank_label}: the script has changed '{changed[0]}'{more} since the "
                "last step. Under parameter_server the servers hold the parameters, and the change "
                "would be lost. Call optimizer.flush() on all ranks first, then change parameters: "
                "the next step begins with them. What every step does to parameters belongs into "
                "the step() of a subclass of your optimizer, which runs at the servers."
            )

    def _open(self) -> None:
        """Begin an episode, so that this rank's server may copy model and optimizer. Local."""
        if self._is_open:
            return
        self._is_open, self._is_finished_by_join = True, False
        self._known.note()
        self._clock = 0
        if self._server is not None:
            self._server.open(self._episode)

    # ---- the end of an episode ----

    def flush(self) -> None:
        """See `Schedule.flush`: wait until all workers call it, and pull the final parameters.

        All ranks then hold the same parameters and the whole optimizer state.
        """
        if self._is_finished_by_join:
            self._is_finished_by_join = False
            return
        self._finish()

    def _finish(self) -> None:
        self._raise_if_changed()
        self._collect()
        self._open()
        episode = {"episode": self._episode}
        record = {**episode, "record": [dict(self._updates_late), self._max_steps_ahead]}
        replies = self._client.request("finish", dict.fromkeys(self._memory, record))
        self._install(replies)
        for reply in replies.values():
            for rank, (counts, max_ahead) in reply.records.items():
                self._reported[rank] = Counter(counts), max_ahead
        self._gather_state()
        self._client.request("confirm", dict.fromkeys(self._memory, episode))
        self._episode += 1
        self._is_open = False

    def _gather_state(self) -> None:
        """Copy the state of the optimizer from the servers into the inner one."""
        gathered = self._client.request("state", dict.fromkeys(self._memory, {}))
        states = self._inner.state
        for server, name, parameter, _ in self._places:
            state = gathered[server].get(name)
            states.pop(parameter, None)
            if state is not None:
                states[parameter] = device_copy(state, parameter)

    def rebuild(self) -> None:
        """Raises UnsupportedError: parameters cannot be added, because servers own them."""
        raise UnsupportedError(
            f"{self._comm.rank_label}: parameters were added to the optimizer, but the servers "
            "were started without them. Call flush() and close(), and make a new optimizer."
        )

    def state_dict(self) -> dict[str, Any]:
        """See `Schedule.state_dict`. Copies the servers' current state into the inner optimizer.

        Servers continue meanwhile; after `flush` the state and the model are consistent.
        """
        self._collect()
        if self._is_open:
            self._gather_state()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Schedule.load_state_dict`; servers copy the model and the state at the next step."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
        self._episode += 1
        self._is_open = self._is_finished_by_join = False

    # ---- inside ----

    def _act_on(self, nonfinite: list[str]) -> None:
        """Record nonfinite gradients, and call the hooks before a step.

        One of these is ours, which raises or warns as ``on_nonfinite`` says.
        """
        problem, nonfinite_log = None, self._exchange.nonfinite
        if nonfinite:
            problem = NonfiniteGradients(self._reducer.step, {self._comm.rank: nonfinite})
        nonfinite_log.record(problem)
        self._call_hooks(STEP_HOOKS[0])

    def _call_hooks(self, which: str) -> None:
        """Call hooks of the inner optimizer's step, as a worker does not call that step itself."""
        for hook in [*getattr(self._inner, which).values()]:
            hook(self._inner, (), {})

    def _raise_if_unsupported(self) -> None:
        comm, reducer = self._comm, self._reducer
        if isinstance(self._inner, LBFGS):
            raise UnsupportedError(
                "parameter_server does not support LBFGS, which couples all parameters: each "
                "server has only some. Use an optimizer that updates each parameter independently."
            )
        if self.servers != "all" and self.servers >= comm.size:
            raise UnsupportedError(
                f"servers={self.servers} of {comm.size} ranks leave none to train. Use fewer, or "
                "servers='all'."
            )
        if reducer.codec is not None and not isinstance(reducer.codec, StripeCodec):
            raise UnsupportedError(
                f"{reducer.codec.name} needs the gradients of all ranks at once, which "
                "parameter_server never has. Use float16, bfloat16, int8 or fewer bits."
            )
        if comm.name == "pure_nccl":
            raise UnsupportedError(
                "parameter_server goes through host memory, over gloo or MPI, and pure_nccl uses "
                "neither. Use 'flat' or 'hierarchical', also for GPUs."
            )

    def _raise_if_misused(self, closure: Callable[[], float] | None) -> None:
        rank_label = self._comm.rank_label
        if self.traits.serves:
            raise UsageError(
                f"{rank_label}: this rank only serves (servers={self.servers}) and does not "
                "train: call optimizer.serve() instead of the training loop."
            )
        if closure is not None:
            raise UnsupportedError(
                f"{rank_label}: parameter_server does not support step(closure): workers do not "
                "step together. Compute loss and gradients before step()."
            )
        if self._contribution.weight != 1.0:
            raise UnsupportedError(
                f"{rank_label}: parameter_server does not support weights: each worker's gradient "
                "is a separate update. Use weight='rank' and scale the loss instead."
            )
        held = set(parameters_of(self._inner))
        if len(held) != len(self._parameters):
            self.rebuild()


def _is_finite(grad: Tensor | None) -> bool:
    if grad is None or grad.layout != torch.strided:
        return True
    # The sum first: it is one pass without memory, and finite if nothing is wrong.
    return bool(torch.isfinite(grad.sum())) or bool(torch.isfinite(grad).all())
