"""The settings of the chaos benchmark as data: workers, launcher, backend and training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

BLOCK_STEPS = 8
"""Steps of a block, for the block schedules of `training`."""

Launcher = Literal["torchmn run", "mpirun", "torchrun", "elastic"]
"""How a job is started; elastic is `torchmn run --elastic`, which restarts ranks that fail."""
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
Backend = Literal["gloo", "mpi"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train. Under mpirun and torchrun the script installs the crash handler itself.

    ``workers`` has the number of workers on each host: one entry is this machine, several are test
    hosts. ``num_loaders`` is the number of a rank's DataLoader workers. ``timeout_s`` is the
    time-out of a collective, doubled for the first one. ``share`` is the relative frequency of the
    setting among those of its launcher. ``is_exact``: a resumed run must end with the same bits as
    an undisturbed one.
    """

    workers: tuple[int, ...] = (2,)
    launcher: Launcher = "torchmn run"
    backend: Backend = "gloo"
    route: str = "hierarchical"
    schedule: str = "every_step"
    codec: str = "float32"
    num_loaders: int = 0
    num_steps: int = 100
    period_steps: int = 8
    timeout_s: float = 10.0
    share: float = 1.0
    is_exact: bool = True

    @property
    def num_workers(self) -> int:
        """The number of workers on all hosts."""
        return sum(self.workers)

    @property
    def has_hosts(self) -> bool:
        """Whether it needs test hosts."""
        return len(self.workers) > 1

    @property
    def num_first_steps(self) -> int:
        """The number of steps up to the first exchange, which is later for block schedules."""
        return 2 * BLOCK_STEPS + 1 if self.schedule in ("block_momentum", "diloco") else 2

    @property
    def training(self) -> tuple[str, ...]:
        """What determines the bits; with ``workers`` it is the key of the reference run."""
        numbers = str(self.num_steps), f"loaders{self.num_loaders}"
        return (self.backend, self.route, self.schedule, self.codec, *numbers)

    @property
    def name(self) -> str:
        """For tables."""
        where = "+".join(map(str, self.workers))
        loaders = " DataLoader" if self.num_loaders else ""
        return f"{where} {self.launcher} {self.backend} {self.schedule} {self.codec}{loaders}"


SETTINGS = (
    Setting(share=2),
    Setting(workers=(3,), route="flat", share=2),
    Setting(workers=(4,), route="naive"),
    Setting(backend="mpi", share=2),
    Setting(workers=(3,), backend="mpi"),
    Setting(schedule="double_buffering"),
    Setting(codec="1bit"),
    Setting(schedule="block_momentum"),
    Setting(workers=(3,), schedule="diloco", codec="int8"),
    Setting(launcher="mpirun", backend="mpi", share=2),
    Setting(workers=(3,), launcher="mpirun", backend="gloo"),
    Setting(launcher="mpirun", backend="mpi", num_loaders=1),
    Setting(launcher="torchrun"),
    Setting(workers=(3,), launcher="torchrun", schedule="double_buffering"),
    Setting(launcher="torchrun", codec="int8"),
    Setting(launcher="torchrun", num_loaders=1),
    Setting(launcher="elastic"),
    Setting(workers=(3,), launcher="elastic", route="flat"),
    Setting(launcher="elastic", schedule="block_momentum"),
    Setting(num_loaders=1),
    Setting(workers=(1, 1), share=3),
    Setting(workers=(2, 1), share=1.5),
    Setting(workers=(1, 1), backend="mpi"),
    Setting(workers=(1, 1), codec="int8", schedule="double_buffering"),
)
