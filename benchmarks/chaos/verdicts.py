"""What must come of a fault: pure functions of the output and of how the job ended."""

from __future__ import annotations

import re
from collections.abc import Sequence

from chaos.faults import Fault
from chaos.job import Line
from chaos.settings import Setting
from chaos.strike import NO_SPACE

_OURS = "torchmn: "
HANG_MARGIN_S = 5.0


def names_culprit(text: str, fault: Fault, setting: Setting) -> bool:
    """Whether a line of the output names the first_failure of the fault."""
    rank = fault.rank
    if fault.kind.startswith("network"):
        return re.search(r"\bn1\b|network", text) is not None and "hosts n" not in text
    if fault.kind == "SIGSTOP":
        return re.search(rf"\brank {rank}\b( on \S+)?[^;]*stopped", text) is not None
    if fault.kind == "exit" and fault.status == 0:
        return re.search(rf"\brank {rank}\b.*(ended|end of its script)", text) is not None
    return re.search(rf"\brank {rank}\b", text) is not None


def last_sentence(lines: Sequence[Line]) -> str:
    """The last line that is the product's own word."""
    ours = [line.text for line in lines if line.text.startswith(_OURS)]
    return ours[-1] if len(ours) > 1 or (ours and "worker(s) with" not in ours[0]) else ""


def is_named(lines: Sequence[Line], fault: Fault, setting: Setting) -> bool | None:
    """Whether the last word names the first_failure; None where that is not promised.

    A foreign launcher's job is watched from `install_crash_handler` on, and who was killed himself
    says nothing.
    """
    if fault.kind == "launcher killed":
        return None
    is_right = names_culprit(last_sentence(lines), fault, setting)
    if not is_right and setting.launcher != "torchmn run" and fault.when == "start":
        return None
    return is_right


def detection_s(
    lines: Sequence[Line], struck_at: float, fault: Fault, setting: Setting
) -> float | None:
    """From the fault to the first line that says what it was; None if there is none."""
    for line in lines:
        if line.at < struck_at:
            continue
        if fault.kind == "disk full":
            is_it = NO_SPACE in line.text
        else:
            is_ours = line.text.startswith((_OURS, "Hang:", "Rank"))
            is_it = is_ours and names_culprit(line.text, fault, setting)
        if is_it:
            return round(line.at - struck_at, 3)
    return None


def has_right_status(status: int, fault: Fault, setting: Setting) -> bool:
    """Whether the job's exit status is what is promised."""
    if fault.kind == "launcher killed":
        return status in (-9, 137)
    if setting.launcher != "torchmn run" or fault.kind.startswith("network"):
        return status != 0
    expected = {"kill": 137, "flipped byte": 137, "disk full": 137, "SIGTERM": 143}
    if fault.kind == "exit":
        return status == abs(fault.status) if fault.status else status != 0
    return status == expected.get(fault.kind, 1)


def hang_limit_s(fault: Fault, setting: Setting) -> float:
    """Within what time a hang has to be named: the time-out, the first one twice as long."""
    is_first = fault.when == "start" or fault.step < setting.num_first_steps
    return setting.timeout_s * (2 if is_first else 1) + HANG_MARGIN_S
