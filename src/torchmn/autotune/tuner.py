"""The right exchange for the network at hand, chosen by measurement.

    steps 1, 2        every step in float32, to warm up
    steps 3 to 6      the same, timed: when which gradient is ready, how long a step takes
    then              links and codecs are timed, every plan is predicted (`choose`)
    4 steps each      the best few plans are tried, all of them twice, in turns
    from then on      the fastest of them

All ranks switch at one step boundary. The communicator, the optimizer and the model stay. Numbers
are those of the slowest rank; rank 0 decides and all follow. Plans that lose bits, are a step late
or change parameters after `step` are tried only where the user allowed it, and not where the first
steps show that the script cannot work with them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchmn.autotune.predict import CodecFacts, Plan, ReadyGradient, StepFacts, ranked, shortlist
from torchmn.autotune.step_timer import StepTimer
from torchmn.communicators import Communicator
from torchmn.communicators.link_speed import LinkSpeed, measure_links
from torchmn.compression import ErrorFeedback, create_codec
from torchmn.compression.codec_timing import codec_seconds_per_element
from torchmn.errors import UsageError
from torchmn.gradients.reducer import GradientReducer
from torchmn.resharding import reshard_object
from torchmn.schedules.base import USED_BY_SCALER, DefersUpdates, ReplicaConsistency, Schedule
from torchmn.units import MiB

NUM_WARM_UP = 2
NUM_TIMED = 4
MAX_TRIALS = 4
WITHIN = 1.5  # times the best prediction is worth a trial
MARGIN = 1.02  # what loses bits, or is late, must be so much better
DRIFT = 1.25  # with retune=True: so much slower than planned, and it is planned anew
RETUNE_STEPS = 200
_ONE_PASS = ("double_buffering", "every_step_next_forward")
BUCKET_BYTES = (MiB, 4 * MiB, 16 * MiB)


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What may be chosen: schedules and codecs by name, the plainest first."""

    schedules: Mapping[str, Callable[[], Schedule]]
    codecs: Sequence[str]

    def plans(self) -> list[Plan]:
        """All combinations, the plainest first."""
        return [
            Plan(schedule=schedule, codec=codec, bucket_bytes=nbytes)
            for schedule in self.schedules
            for codec in self.codecs
            for nbytes in BUCKET_BYTES
        ]


@dataclass(frozen=True)
class Trial:
    """A plan and the median of its steps in one turn, of the slowest rank."""

    plan: Plan
    step_s: float


class Autotuner(Schedule):
    """Measures the first steps, then goes on with the fastest schedule, codec and bucket size.

    It is a schedule around another one. ``retune=True`` looks again when steps have become slower,
    and gives up that a repeated run has the same bits.
    """

    name = "auto"
    num_sets = 1
    counts_samples = False
    _reducer: GradientReducer
    _inner: Optimizer

    def __init__(self, choices: SearchSpace, *, retune: bool = False) -> None:
        self.choices = choices
        self.retune = retune
        self.plan: Plan | None = None
        """What was decided; None while it is being measured."""
        self.reason = ""
        """Why, in three lines."""
        self.trials: list[Trial] = []
        self._untried: list[Plan] = []
        self._trying: Plan | None = None
        self._using: Plan | None = None
        self._must_start_over = False
        self._num_passes = 0
        """Backward passes since the last step."""
        self._left_out: dict[str, str] = {}
        """Schedules that the script cannot work with, or would gain nothing from, and why."""
        self._planned_s = 0.0
        self._is_attached = False
        self._models: Sequence[nn.Module] = ()
        self._why_wait: str | None = None
        self.current: Schedule = next(iter(choices.schedules.values()))()

    @property
    def staleness_steps(self) -> int:
        """That of the schedule in use."""
        return self.current.staleness_steps

    @property
    def replica_consistency(self) -> ReplicaConsistency:
        """That of the schedule in use."""
        return self.current.replica_consistency

    def attach(self, reducer: GradientReducer, inner: Optimizer) -> None:
        """See `Schedule.attach`."""
        self._reducer, self._inner = reducer, inner
        self._default = Plan(
            schedule=next(iter(self.choices.schedules)),
            codec=self.choices.codecs[0],
            bucket_bytes=reducer.comm.bucket_bytes,
        )
        self._start_over()

    def _start_over(self) -> None:
        self.plan, self.trials, self._untried, self._trying = None, [], [], None
        self._must_start_over = False
        self._clock = StepTimer()
        self._use(self._default)

    # ---- as the schedule in use ----

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`."""
        started = time.perf_counter()
        self._num_passes += 1
        if self._num_passes > 1:
            self._left_out["double_buffering"] = "two backward passes before a step"
        self.current.backward_ended()
        self._clock.backward_ended(time.perf_counter() - started)

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """See `Schedule.step`. Some of the first steps end with a decision."""
        if closure is not None:
            self._left_out |= dict.fromkeys(_ONE_PASS, "step() has a closure")
        result = self.current.step(closure)
        self._num_passes = 0
        self._step_ended()
        return result

    def shadow_step(self) -> int:
        """See `Schedule.shadow_step`."""
        num_active = self.current.shadow_step()
        if num_active:
            self._step_ended()
        return num_active

    def on_zero_grad(self) -> None:
        """See `Schedule.on_zero_grad`."""
        self._num_passes = 0
        self.current.on_zero_grad()

    def flush(self) -> None:
        """See `Schedule.flush`."""
        self.current.flush()

    def rebuild(self) -> None:
        """See `Schedule.rebuild`."""
        self.current.rebuild()

    def close(self) -> None:
        """See `Schedule.close`."""
        self.current.close()

    def state_dict(self) -> dict[str, Any]:
        """See `Schedule.state_dict`: the plan, or how far measuring is, and what is in use."""
        state: dict[str, Any] = {
            "current": self.current.state_dict(),
            "using": asdict(self._using or self._default),
            "reason": self.reason,
        }
        if self.plan is not None:
            return {**state, "plan": asdict(self.plan), "planned_s": self._planned_s}
        return {
            **state,
            "default": asdict(self._default),
            "is_trial": self._trying is not None,
            "untried": [asdict(plan) for plan in self._untried],
            "trials": [(asdict(trial.plan), trial.step_s) for trial in self.trials],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Schedule.load_state_dict`. *Collective*: what is in use may change.

        A state with a plan goes on with it. One that was saved while plans were measured goes on
        measuring, with the plan that was in use: that one's steps are timed anew.
        """
        if state.keys() & {"plan", "using"} and not self._may_use(Plan(**state["using"])):
            if state["current"].keys() - {"plan"}:
                raise UsageError(
                    f"This state was saved while 'auto' used {state['using']['schedule']} and "
                    "holds gradients that no step has applied, but now that schedule is not "
                    "allowed. Allow it (allow_stale=True), or call flush() before saving."
                )
            self._start_over()
            return
        if "plan" in state:
            self._decide(Plan(**state["plan"]), "the plan was saved with the state")
            self._planned_s = state.get("planned_s", 0.0)
        elif "using" in state:
            self._start_over()
            self._use(Plan(**state["using"]))
            self._default = Plan(**state["default"])
            self.reason = state["reason"]
            self._trying = Plan(**state["using"]) if state["is_trial"] else None
            untried = [Plan(**row) for row in state["untried"]]
            self._untried = [plan for plan in untried if self._may_use(plan)]
            trials = [Trial(Plan(**row), step_s) for row, step_s in state["trials"]]
            self.trials = [trial for trial in trials if self._may_use(trial.plan)]
            self._must_start_over = state.get("is_of_other_ranks", False)
        elif state:
            self._start_over()
        self.current.load_state_dict(state.get("current", {}))

    def _may_use(self, plan: Plan) -> bool:
        return plan.schedule in self.choices.schedules and plan.codec in self.choices.codecs

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """See `Resharding`. The old plan is used for one step, then all is measured anew."""
        if any("using" not in state for state in states):
            return states[0]
        using = states[0]["using"]
        schedule = self.choices.schedules.get(using["schedule"], lambda: self.current)()
        return {
            "current": reshard_object(schedule, [state["current"] for state in states], comm),
            "using": using,
            "default": asdict(self._default),
            "reason": "",
            "is_trial": False,
            "untried": [],
            "trials": [],
            "is_of_other_ranks": True,
        }

    def resume_warnings(self) -> list[str]:
        """See `MultiNodeOptimizer.resume_warnings`."""
        return ["'auto' measures anew and may choose another plan: its plan was for the old ranks."]

    # ---- DefersUpdates, if the schedule in use is ----

    def install_hooks(self, models: Sequence[nn.Module], sync_reason: str | None) -> None:
        """See `DefersUpdates.install_hooks`."""
        self._models, self._why_wait = models, sync_reason
        if sync_reason is not None:
            self._left_out["every_step_next_forward"] = sync_reason
        if isinstance(self.current, DefersUpdates):
            self.current.install_hooks(models, sync_reason)

    @property
    def has_pending_updates(self) -> bool:
        """See `DefersUpdates.has_pending_updates`."""
        return isinstance(self.current, DefersUpdates) and self.current.has_pending_updates

    def await_gradients(self, reason: str | None = None) -> None:
        """See `DefersUpdates.await_gradients`."""
        if self._num_passes and reason is not None:
            self._left_out["every_step_next_forward"] = reason
            if reason == USED_BY_SCALER:
                self._left_out["double_buffering"] = reason
        if isinstance(self.current, DefersUpdates):
            self.current.await_gradients(reason)

    def complete(self) -> None:
        """See `DefersUpdates.complete`."""
        if isinstance(self.current, DefersUpdates):
            self.current.complete()

    # ---- measuring and deciding; collective, at the end of a step ----

    def _step_ended(self) -> None:
        if self._must_start_over:
            self._start_over()
            return
        if self.plan is not None and not self.retune:
            return
        self._clock.step_ended()
        num_steps = len(self._clock.steps_s)
        if self.plan is not None:
            if num_steps == RETUNE_STEPS:
                self._look_for_drift()
        elif self._trying is not None:
            warm_up = getattr(self.current, "num_warm_up_steps", 1 + self.current.staleness_steps)
            if num_steps == warm_up + NUM_TIMED:
                self.trials.append(Trial(self._trying, self._slowest_s()))
                self._try_next()
        elif num_steps == NUM_WARM_UP:
            self._clock.watch(list(self._reducer.parameters()))
        elif num_steps == NUM_WARM_UP + NUM_TIMED:
            self._predict()

    def _slowest_s(self) -> float:
        """The median of the timed steps on the slowest rank."""
        mine = torch.tensor([self._clock.median_s(NUM_TIMED)], dtype=torch.float64, device="cpu")
        return float(self._reducer.comm.allreduce(mine, "max"))

    def _predict(self) -> None:
        """Measure links and codecs, and find what is worth a trial."""
        comm = self._reducer.comm
        self.trials.append(Trial(self._default, self._slowest_s()))
        group = comm.inter_node_group
        link = comm.engine.call(lambda: measure_links(group)) if group is not None else None
        mine = self._clock.facts(NUM_TIMED)
        codecs = [
            CodecFacts(
                name=name,
                bits=getattr(codec, "bits", 32.0),
                coding_s=codec_seconds_per_element(codec, comm.device),
            )
            for name, codec in ((name, create_codec(name)) for name in self.choices.codecs)
        ]
        everybody = comm.gather_obj(
            (asdict(mine), [asdict(codec) for codec in codecs], self._left_out)
        )
        told: tuple[list[dict[str, Any]], str] = ([], "")
        if everybody is not None:
            slowest = max((_step_facts(s) for s, _, _ in everybody), key=lambda s: s.compute_s)
            codecs = [
                max((CodecFacts(**row[i]) for _, row, _ in everybody), key=lambda c: c.coding_s)
                for i in range(len(codecs))
            ]
            left_out = {name: why for _, _, own in everybody for name, why in own.items()}
            plans: list[Plan] = []
            if link is not None and group is not None:
                bearable = [
                    plan
                    for plan in self.choices.plans()
                    if plan.schedule == self._default.schedule or plan.schedule not in left_out
                ]
                found = ranked(bearable, slowest, codecs, link, group.size)
                plans = shortlist(found, within=WITHIN, most=MAX_TRIALS)
            told = (
                [asdict(plan) for plan in plans],
                _why(link, slowest) + self._why_left_out(left_out),
            )
        chosen, self.reason = comm.bcast_obj(told)
        others = [plan for plan in (Plan(**row) for row in chosen) if plan != self._default]
        # In turns: a slow spell of a machine that others use as well meets all of them.
        self._untried = [*others, self._default, *others] if others else []
        self._try_next()

    def _why_left_out(self, left_out: Mapping[str, str]) -> str:
        return "".join(
            f"; without {name}: {why}"
            for name, why in left_out.items()
            if name in self.choices.schedules and name != self._default.schedule
        )

    def _try_next(self) -> None:
        """Switch to the next plan on trial; behind the last one decide."""
        if self._untried:
            self._trying = self._untried.pop(0)
            self._use(self._trying)
            return
        least: dict[Plan, float] = {}
        for trial in self.trials:
            least[trial.plan] = min(trial.step_s, least.get(trial.plan, trial.step_s))
        best = min(least, key=least.__getitem__)
        if least[self._default] <= least[best] * MARGIN:
            best = self._default
        tried = ", ".join(f"{plan} {step_s * 1e3:.1f} ms" for plan, step_s in least.items())
        self._planned_s = least[best]
        self._decide(best, f"{self.reason}\ntried: {tried}")

    def _decide(self, plan: Plan, why: str) -> None:
        self.plan, self._trying = plan, None
        self.reason = f"{plan}\n{why}"
        if self._reducer.comm.rank == 0:
            lines = self.reason.replace("\n", "\ntorchmn: ")
            print(f"torchmn: auto takes {lines}", file=sys.stderr, flush=True)
        self._use(plan)

    def _look_for_drift(self) -> None:
        step_s = self._slowest_s()
        self._planned_s = self._planned_s or step_s
        self._clock.restart()
        if step_s > DRIFT * self._planned_s:
            self._start_over()

    def _use(self, plan: Plan) -> None:
        """Switch to a plan. What one codec owes is handed to the next one that can owe."""
        reducer = self._reducer
        if self._is_attached:
            self.current.flush()
            self.current.close()
        self._is_attached, self._using = True, plan
        before, codec = reducer.codec, create_codec(plan.codec)
        codec = codec.new_instance() if codec is not None else None
        if isinstance(before, ErrorFeedback) and isinstance(codec, ErrorFeedback):
            codec.load_state_dict({"residuals": before.state_dict()["residuals"]})
        self.current = self.choices.schedules[plan.schedule]()
        reducer.comm.bucket_bytes = plan.bucket_bytes
        reducer.reconfigure(reducer.comm, codec, num_sets=self.current.num_sets)
        self.current.attach(reducer, self._inner)
        if self._models:
            self.install_hooks(self._models, self._why_wait)
        self._clock.restart()


def _step_facts(row: dict[str, Any]) -> StepFacts:
    gradients = tuple(ReadyGradient(**gradient) for gradient in row["gradients"])
    return StepFacts(**{**row, "gradients": gradients})


def _why(link: LinkSpeed | None, step: StepFacts) -> str:
    megabytes = sum(gradient.nbytes for gradient in step.gradients) / 1e6
    if link is None:
        return f"nothing crosses a network: {megabytes:.1f} MB of gradients stay on one node"
    return (
        f"measured: {link}; a step computes {step.compute_s * 1e3:.1f} ms "
        f"(backward {step.backward_s * 1e3:.1f} ms) for {megabytes:.1f} MB of gradients"
    )
