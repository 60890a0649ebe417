"""Select schedule, codec and bucket size for the network, by measurement.

    steps 1, 2        the default plan (every step, float32), to warm up
    steps 3 to 6      the same, timed: when each gradient is ready, how long a step takes
    then              links and codecs are timed, and every plan is predicted (`predict`)
    4 steps each      the best few plans are tried, all of them twice, in turns
    from then on      the fastest of them

All ranks switch at the same step. The communicator, the optimizer and the model stay the same. All
times are those of the slowest rank; rank 0 decides and all ranks follow. On a GPU they are times of
its streams (`StepClock`), for which the host waits once in each trial, between two steps. Plans
that lose bits, or whose gradients are a step late, are tried only if the user allowed it, and not
if the first steps show that the script cannot work with them.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchmn.base.names import DOUBLE_BUFFERING
from torchmn.cluster.units import MiB
from torchmn.comm.codecs import ErrorFeedback, create_codec
from torchmn.comm.codecs.codec_timing import measure_codec
from torchmn.comm.codecs.layout import is_small
from torchmn.comm.link_speed import LinkSpeed, measure_links
from torchmn.exchange.auto.predict import (
    CodecFacts,
    Plan,
    ReadyGradient,
    StepFacts,
    ranked,
    shortlist,
)
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.parameter_hook import watch_gradient
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.resharding import warnings_of
from torchmn.exchange.schedules.base import Schedule, Traits
from torchmn.record.timeline import Mark, StepClock, clock_of

NUM_WARM_UP = 2
NUM_TIMED = 4
MAX_TRIALS = 4
WITHIN = 1.5  # plans up to this multiple of the best prediction are tried
MARGIN = 1.02  # the default plan is kept unless another one is this much faster in all its turns
BUCKET_BYTES = (MiB, 4 * MiB, 16 * MiB)
_POLL_S = 0.0005


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The candidate schedules and codecs, the default ones first."""

    schedules: Mapping[str, Callable[[], Schedule]]
    codecs: Sequence[str]

    def __str__(self) -> str:
        return ", ".join((*self.schedules, *self.codecs))

    def plans(self) -> list[Plan]:
        """All combinations of schedule, codec and bucket size, the default ones first."""
        return [
            Plan(schedule=schedule, codec=codec, bucket_bytes=nbytes)
            for schedule in self.schedules
            for codec in self.codecs
            for nbytes in BUCKET_BYTES
        ]

    def contains(self, plan: Plan) -> bool:
        """Whether the schedule and the codec of a plan are candidates."""
        return plan.schedule in self.schedules and plan.codec in self.codecs


@dataclass(frozen=True)
class Trial:
    """A plan, and the median time of its steps in one trial on the slowest rank."""

    plan: Plan
    step_s: float


class Autotuner(Schedule):
    """Wraps the schedule in use: measures the first steps, then selects the fastest plan."""

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.current: Schedule = next(iter(space.schedules.values()))()
        self.plan: Plan | None = None  # the selected plan; None during the measurements
        self.reason = ""  # why the plan was selected, in three lines
        self.trials: list[Trial] = []
        self._untried: list[Plan] = []
        self._trying: Plan | None = None
        self._must_start_over = False
        # Schedules that cannot work in this script, or gain nothing, with the reason.
        self._excluded: dict[str, str] = {}

    @property
    def traits(self) -> Traits:
        """The traits of the schedule in use."""
        return self.current.traits

    def attach(
        self, reducer: GradientReducer, inner: Optimizer, models: Sequence[nn.Module]
    ) -> None:
        """See `Schedule.attach`. The optimizer has the first codec of the search space."""
        super().attach(reducer, inner, models)
        self._models, comm = models, reducer.comm
        self._timer = self._new_timer()
        self._default = self._using = Plan(
            schedule=next(iter(self.space.schedules)),
            codec=self.space.codecs[0],
            bucket_bytes=comm.route.bucket_bytes,
        )
        self.current.attach(reducer, inner, models)

    # ---- the schedule in use ----

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`."""
        if self._exchange.num_in_step:
            self._excluded[DOUBLE_BUFFERING] = "two backward passes before a step"
        if self.plan is not None:
            self.current.backward_ended()
            return
        with self._timer.waiting():
            self.current.backward_ended()

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """See `Schedule.step`. *Collective*: it may switch to another plan."""
        if closure is not None:
            self._excluded[DOUBLE_BUFFERING] = "step() has a closure"
        result = self.current.step(closure)
        if self._reducer.is_active or self._exchange.num_active:
            self._step_ended()
        return result

    def scaler_used(self) -> None:
        """Note that a GradScaler inspects the gradients before the step. Local."""
        if self._exchange.num_in_step:
            self._excluded[DOUBLE_BUFFERING] = "a GradScaler looks at all gradients"

    def flush(self) -> None:
        """See `Schedule.flush`."""
        self.current.flush()

    def before_access(self, access: Literal["read", "load"]) -> None:
        """See `Schedule.before_access`."""
        self.current.before_access(access)

    def rebuild(self) -> None:
        """See `Schedule.rebuild`."""
        self.current.rebuild()

    def close(self) -> None:
        """See `Schedule.close`."""
        self.current.close()

    def _step_ended(self) -> None:
        if self._must_start_over:
            self._start_over()
            return
        if self.plan is not None:  # nothing is measured any more
            return
        self._timer.step_ended()
        num_steps = self._timer.num_steps
        if self._trying is not None:
            num_warm_up = 1 + self.traits.staleness_steps
            if num_steps == num_warm_up + NUM_TIMED:
                self.trials.append(Trial(self._trying, self._slowest_s()))
                self._try_next()
        elif num_steps == NUM_WARM_UP:
            self._timer.record_gradients(self._exchange.trained())
        elif num_steps == NUM_WARM_UP + NUM_TIMED:
            self._predict()

    # ---- measuring and deciding; collective ----

    def _new_timer(self) -> StepTimer:
        comm = self._reducer.comm
        return StepTimer(clock_of(comm.device.type), comm.engine.raise_failure)

    def _start_over(self) -> None:
        self.plan, self.trials, self._untried, self._trying = None, [], [], None
        self._must_start_over = False
        self._timer = self._new_timer()
        self._use(self._default)

    def _slowest_s(self) -> float:
        """The median of the timed steps, on the slowest rank. *Collective.*"""
        mine = torch.tensor([self._timer.median_s(NUM_TIMED)], dtype=torch.float64, device="cpu")
        comm = self._reducer.comm
        return float(comm.allreduce(mine, "max"))

    def _predict(self) -> None:
        """Time links and codecs, and select the plans to try. *Collective.*"""
        comm = self._exchange.comm
        self.trials.append(Trial(self._default, self._slowest_s()))
        group = comm.route.inter_node_group
        link = None
        if group is not None:  # on the engine, which keeps collectives of all ranks in one order
            link = comm.engine.call(lambda: measure_links(group, comm.device))
        mine = self._timer.facts(NUM_TIMED)
        codecs = [timed_codec(name, comm.device) for name in self.space.codecs]
        gathered = comm.gather_obj((replace(mine, deviations=()), codecs, self._excluded))
        plans: list[Plan] = []
        text = ""
        if gathered is not None:
            slowest = max((step for step, _, _ in gathered), key=lambda step: step.compute_s)
            codecs = [
                max(same, key=lambda codec: codec.encode_s)
                for same in zip(*(own for _, own, _ in gathered), strict=True)
            ]
            excluded = {name: why for _, _, own in gathered for name, why in own.items()}
            if link is not None and group is not None:
                default = self._default.schedule
                possible = [
                    plan
                    for plan in self.space.plans()
                    if plan.schedule == default or plan.schedule not in excluded
                ]
                found = ranked(possible, slowest, codecs, link, group.size)
                plans = shortlist(found, within=WITHIN, max_plans=MAX_TRIALS)
            text = _describe(link, slowest) + self._describe_excluded(excluded)
        chosen, self.reason = comm.bcast_obj((plans, text))
        others = [plan for plan in chosen if plan != self._default]
        # In turns, so that a slow phase of a shared machine affects all of them.
        self._untried = [*others, self._default, *others] if others else []
        self._try_next()

    def _describe_excluded(self, excluded: Mapping[str, str]) -> str:
        return "".join(
            f"; without {name}: {why}"
            for name, why in excluded.items()
            if name in self.space.schedules and name != self._default.schedule
        )

    def _try_next(self) -> None:
        """Switch to the next plan to try; after the last one, decide. *Collective.*"""
        if self._untried:
            self._trying = self._untried.pop(0)
            self._use(self._trying)
            return
        turns: dict[Plan, list[float]] = defaultdict(list)
        for trial in self.trials:
            turns[trial.plan].append(trial.step_s)
        best = min(turns, key=lambda plan: min(turns[plan]))
        # The turns of a plan differ by the noise: what is slower in one of them is not faster.
        if max(turns[best]) * MARGIN >= min(turns[self._default]):
            best = self._default
        tried = ", ".join(f"{plan} {min(own) * 1e3:.1f} ms" for plan, own in turns.items())
        if len(turns) > 1 and best == self._default:
            tried += f"; the first is kept, as none was {MARGIN - 1:.0%} faster in both turns"
        self._decide(best, f"{self.reason}\ntried: {tried}")

    def _decide(self, plan: Plan, why: str) -> None:
        self.plan, self._trying = plan, None
        self.reason = f"{plan}\n{why}"
        comm = self._reducer.comm
        comm.logger(__name__).info("auto selected %s", self.reason)
        self._use(plan)

    def _use(self, plan: Plan) -> None:
        """Continue with a plan. *Collective*, between two steps.

        Pending means are applied first; a codec with error feedback takes over the residuals of
        another one.
        """
        self._using = plan
        self.current.flush()
        self.current.close()
        reducer, codec = self._reducer, create_codec(plan.codec)
        before = reducer.codec
        if codec is not None:
            codec = codec.new_instance()
        if isinstance(before, ErrorFeedback) and isinstance(codec, ErrorFeedback):
            codec.load_state_dict({"residuals": before.state_dict()["residuals"]})
        self.current = self.space.schedules[plan.schedule]()
        reducer.reconfigure(
            reducer.comm, codec, num_sets=self.traits.num_sets, bucket_bytes=plan.bucket_bytes
        )
        self.current.attach(reducer, self._inner, self._models)
        self._timer.restart()

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule in use, its plan, and whether it was selected. Local."""
        return {
            **self.current.state_dict(),
            "tuner": {"using": asdict(self._using), "is_selected": self.plan is not None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of the schedule in use, after `load_plan`."""
        self.current.load_state_dict(state)

    def load_plan(self, state: dict[str, Any]) -> None:
        """Continue with the plan that is saved under ``tuner``. *Collective*: it may switch.

        If the plan was not selected yet, one step is made with it, as the saved state belongs to
        it, and then everything is measured anew. Without a state, or if the plan is not in the
        search space, everything is measured anew at once.
        """
        if not state or not self.space.contains(Plan(**state["using"])):
            self._start_over()
        elif state["is_selected"]:
            self._decide(Plan(**state["using"]), "the plan was saved with the state")
        else:
            self._start_over()
            self._use(Plan(**state["using"]))
            self._must_start_over = True

    def resume_warnings(self) -> list[str]:
        """See `MultiNodeOptimizer.resume_warnings`."""
        return [
            *warnings_of(self.current),
            "'auto' measures again and may select another plan: its plan was for the old ranks.",
        ]


def timed_codec(name: str, device: torch.device) -> CodecFacts:
    """Time a codec on this machine. Local. Raises UnknownNameError: there is none of this name."""
    return CodecFacts(name=name, **asdict(measure_codec(create_codec(name), device)))


def _describe(link: LinkSpeed | None, step: StepFacts) -> str:
    megabytes = sum(gradient.nbytes for gradient in step.gradients) / 1e6
    if link is None:
        return f"nothing crosses a network: {megabytes:.1f} MB of gradients stay on one node"
    return (
        f"measured: {link}; a step computes {step.compute_s * 1e3:.1f} ms "
        f"(backward {step.backward_s * 1e3:.1f} ms) for {megabytes:.1f} MB of gradients"
    )


class StepTimer:
    """Counts and times the steps of one rank. Local.

    Between `record_gradients` and `facts`, hooks mark when each gradient is ready. At other times
    only the ends of backward passes and steps are marked. A mark has no time before the device has
    passed it, so all times are computed when they are asked for; ``raise_failure`` is called while
    they are waited for.
    """

    def __init__(self, clock: StepClock, raise_failure: Callable[[], None]) -> None:
        self._clock, self._raise_failure = clock, raise_failure
        self._hooks: list[RemovableHandle] = []
        self._ready: dict[Tensor, tuple[Mark, Mark]] = {}  # since the start of its pass
        self._began: Mark = None
        self._backwards: list[tuple[Mark, Mark]] = []
        self.restart()

    @property
    def num_steps(self) -> int:
        """The number of steps since the last `restart`."""
        return len(self._ends) - 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context at the end of a backward pass, in which the exchange is waited for."""
        begin = self._clock.mark()
        yield
        self._waits[-1].append((begin, self._clock.mark()))
        if self._began is not None:
            self._backwards.append((self._began, begin))
            self._began = None

    def step_ended(self) -> None:
        """Note that a step is over and the next one begins."""
        self._ends.append(self._clock.mark())
        self._waits.append([])

    def restart(self) -> None:
        """Discard the steps so far, and the time since the last one."""
        self._ends: list[Mark] = [self._clock.mark()]
        self._waits: list[list[tuple[Mark, Mark]]] = [[]]

    def median_s(self, num_steps: int) -> float:
        """The median time of the last ``num_steps`` steps."""
        while not self._clock.is_over(self._ends[-1]):
            self._raise_failure()
            time.sleep(_POLL_S)
        return self._median(pairwise(self._ends[-num_steps - 1 :]))

    def record_gradients(self, parameters: list[NamedParameter]) -> None:
        """Record from now on when gradients are ready."""
        self._hooks = [
            watch_gradient(parameter, self._record)
            for _, parameter in parameters
            if parameter.requires_grad
        ]

    def facts(self, num_steps: int) -> StepFacts:
        """Return medians of the last ``num_steps`` steps, and remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        step_s, seconds = self.median_s(num_steps), self._clock.seconds
        waits = self._waits[-num_steps - 1 : -1]
        waited_s = statistics.median(sum(seconds(*wait) for wait in own) for own in waits)
        gradients = [
            ReadyGradient(
                ready_s=seconds(*marks),
                numel=parameter.numel(),
                nbytes=parameter.nbytes,
                is_small=is_small(parameter.shape),
            )
            for parameter, marks in self._ready.items()
        ]
        backward_s = self._median(self._backwards) if self._backwards else 0.0
        self._hooks, self._ready, self._backwards = [], {}, []
        return StepFacts(
            compute_s=max(1e-9, step_s - waited_s),
            backward_s=backward_s,
            gradients=tuple(sorted(gradients, key=lambda gradient: gradient.ready_s)),
        )

    def _median(self, spans: Iterable[tuple[Mark, Mark]]) -> float:
        return statistics.median(self._clock.seconds(*span) for span in spans)

    def _record(self, parameter: Tensor) -> None:
        """Record that a gradient is ready.

        The first one counts as the start of the backward pass: nothing is sent before it.
        """
        now = self._clock.mark()
        if self._began is None:
            self._began = now
        self._ready[parameter] = self._began, now
