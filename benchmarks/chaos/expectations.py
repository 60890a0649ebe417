"""Expected results of a fault: pure functions of the output and the exit status of a job."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from chaos.faults import Fault
from chaos.injection import NO_SPACE
from chaos.job import Line
from chaos.settings import Setting
from torchmn.base.errors import shell_code
from torchmn.control.messages import ProcessState

_OURS = "torchmn: "
_STARTS = ", logs in "
HANG_MARGIN_S = 5.0
_NOT_NAMED = ("launcher killed", "stdout closed", "shm full")
"""After these faults no process is left to report it, or any rank may fail first."""
_STATUS = {
    "kill": shell_code(-signal.SIGKILL),
    "out of memory": shell_code(-signal.SIGKILL),
    "flipped byte": shell_code(-signal.SIGKILL),
    "disk full": shell_code(-signal.SIGKILL),
    "SIGTERM": shell_code(-signal.SIGTERM),
}
_ANY_STATUS = ("agent killed", "stdout closed", "shm full", "no file handles")


def names_cause(text: str, fault: Fault, setting: Setting) -> bool:
    """Whether a line of the output names the cause, given the fault."""
    rank = fault.rank
    if fault.kind.startswith("network"):
        return re.search(r"\bn1\b|network", text) is not None and "hosts n" not in text
    if fault.kind == "SIGSTOP":
        stopped = ProcessState.STOPPED.value
        return re.search(rf"\brank {rank}\b( on \S+)?[^;]*{stopped}", text) is not None
    if fault.kind == "exit" and fault.status == 0:
        return re.search(rf"\brank {rank}\b.*(ended|end of its script)", text) is not None
    return re.search(rf"\brank {rank}\b", text) is not None


def message_of(text: str) -> str:
    """What torchmn itself says in a line of the output; empty if nothing.

    Ranks and launchers share a pipe, so a line of another process that has no end yet may precede
    it. The line with which ``torchmn run`` starts is no message.
    """
    start = text.find(_OURS)
    return "" if start < 0 or _STARTS in text else text[start:]


def last_message(lines: Sequence[Line]) -> str:
    """The last message that torchmn itself has printed.

    Under mpirun and torchrun it may be the only one: no line about the start precedes it.
    """
    return next((found for line in reversed(lines) if (found := message_of(line.text))), "")


def is_named(lines: Sequence[Line], fault: Fault, setting: Setting) -> bool | None:
    """Whether the last message names the cause; None where that is not guaranteed.

    A job of another launcher is observed from `install_crash_handler` on, and a killed process
    reports nothing.
    """
    if fault.kind in _NOT_NAMED:
        return None
    is_right = names_cause(last_message(lines), fault, setting)
    if not is_right and setting.launcher != "torchmn run" and fault.when == "start":
        return None
    return is_right


def detection_s(
    lines: Sequence[Line], injected_at: float, fault: Fault, setting: Setting
) -> float | None:
    """Seconds from the fault to the first line that names it; None if there is none."""
    for line in lines:
        if line.at < injected_at:
            continue
        if fault.kind == "disk full":
            is_it = NO_SPACE in line.text
        else:
            own = line.text if line.text.startswith(("Hang:", "Rank")) else message_of(line.text)
            is_it = bool(own) and names_cause(own, fault, setting)
        if is_it:
            return round(line.at - injected_at, 3)
    return None


def has_right_status(status: int, fault: Fault, setting: Setting) -> bool:
    """Whether the job has the expected exit status."""
    if fault.kind == "launcher killed":
        return shell_code(status) == shell_code(-signal.SIGKILL)
    if setting.launcher != "torchmn run" or fault.kind.startswith(("network", *_ANY_STATUS)):
        return status != 0
    if fault.kind == "exit":
        return status == abs(fault.status) if fault.status else status != 0
    return status == _STATUS.get(fault.kind, 1)


def hang_limit_s(fault: Fault, setting: Setting) -> float:
    """The limit for reporting a hang: the time-out, which is doubled for the first exchange."""
    is_first = fault.when == "start" or fault.step < setting.num_first_steps
    return setting.timeout_s * (2 if is_first else 1) + HANG_MARGIN_S
