"""What the processes of a job tell each other: a line of JSON per message, a file per subject."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import get_args

from torchmn.control.messages.elastic import ElasticMessage
from torchmn.control.messages.job import (
    AgentHello,
    EndedBy,
    Exit,
    ForwardSignal,
    JobMessage,
    LogWarning,
    Output,
    Refresh,
    ScriptStarted,
    StartRefused,
    StartScript,
    Stream,
    Terminate,
)
from torchmn.control.messages.monitor import (
    Failed,
    Joined,
    Joining,
    Leaving,
    MonitorHello,
    MonitorMessage,
    Overdue,
    StatusReply,
    StatusRequest,
)

__all__ = [
    "Terminate",
    "EndedBy",
    "Exit",
    "Failed",
    "AgentHello",
    "Joined",
    "Joining",
    "Leaving",
    "Message",
    "LogWarning",
    "ForwardSignal",
    "Output",
    "Overdue",
    "MonitorHello",
    "Refresh",
    "StartRefused",
    "StartScript",
    "ScriptStarted",
    "Stream",
    "StatusRequest",
    "StatusReply",
    "decode",
    "encode",
]

Message = JobMessage | MonitorMessage | ElasticMessage

_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """A message as a line."""
    return json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line. Raises ValueError: it is none of ours."""
    try:
        kind, content = json.loads(line)
        message: Message = _KINDS[kind](**content)
    except (TypeError, KeyError, ValueError, RecursionError):
        raise ValueError(f"No message: {line[:80]!r}") from None
    return message
