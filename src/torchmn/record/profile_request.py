"""The value of ``torchmn run --profile``: steps such as ``100:110`` or ``cprofile``, and a name."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torchmn.base.errors import UsageError
from torchmn.cluster.environment_variables import PROFILE_VARIABLE, RECORD_VARIABLE

FOLDER = "profile"
Kind = Literal["steps", "functions"]
OFF = ("off", "0", "no", "false")
_NAME = re.compile(r"[\w.+@=-]+")


def is_record_off(environ: Mapping[str, str]) -> bool:
    """Whether the environment switches the record off."""
    return environ.get(RECORD_VARIABLE, "").lower() in OFF


@dataclass(frozen=True)
class ProfileRequest:
    """A requested profile: a trace of steps ``first`` to ``last`` - 1, or times of all functions.

    In ``name`` %h stands for the host, %r for the rank and %p for the process.
    """

    kind: Kind
    first: int = 0
    last: int = 0
    name: str = "%h-%r"

    @classmethod
    def parse(cls, text: str) -> ProfileRequest:
        """Parse ``FIRST:LAST[,NAME]`` or ``cprofile[,NAME]``. Raises UsageError."""
        what, _, name = text.partition(",")
        name = name or cls.name
        if not re.search("%[rp]", name):
            name += "-%r"  # ranks of one host have files of their own
        if not _NAME.fullmatch(re.sub("%[hrp]", "", name) or "a"):
            raise UsageError(
                f"The name {name!r} of a profile may hold letters, digits, . _ + @ = - and %h (the "
                "host), %r (the rank), %p (the process)."
            )
        if what == "cprofile":
            return cls("functions", name=name)
        steps = re.fullmatch(r"(\d+):(\d+)", what)
        if steps is None or int(steps[1]) >= int(steps[2]):
            raise UsageError(
                f"--profile {text!r} must be FIRST:LAST, such as 100:110 for steps 100 to 109, or "
                "cprofile. A comma and a name for the files may follow, such as 100:110,%h-%p."
            )
        return cls("steps", int(steps[1]), int(steps[2]), name)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> ProfileRequest | None:
        """Read the request from the environment; None if there is none. Raises UsageError."""
        text = environ.get(PROFILE_VARIABLE)
        return cls.parse(text) if text else None

    def file_name(self, rank: int) -> str:
        """Return the file name for a rank's process, without its ending."""
        values = {"%h": socket.gethostname(), "%r": str(rank), "%p": str(os.getpid())}
        return re.sub("%[hrp]", lambda found: values[found[0]], self.name)
