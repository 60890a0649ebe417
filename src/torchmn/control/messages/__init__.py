"""Messages between the processes of a job, a module per subject."""

from __future__ import annotations

from torchmn.control import codec
from torchmn.control.codec import encode
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
    CollectiveStatus,
    Failed,
    Joined,
    Joining,
    Leaving,
    MonitorHello,
    MonitorMessage,
    Overdue,
    ProcessState,
    StatusReply,
    StatusRequest,
)

__all__ = [
    "AgentHello",
    "CollectiveStatus",
    "EndedBy",
    "Exit",
    "Failed",
    "ForwardSignal",
    "Joined",
    "Joining",
    "Leaving",
    "LogWarning",
    "Message",
    "MonitorHello",
    "Output",
    "Overdue",
    "ProcessState",
    "Refresh",
    "ScriptStarted",
    "StartRefused",
    "StartScript",
    "StatusReply",
    "StatusRequest",
    "Stream",
    "Terminate",
    "decode",
    "encode",
]

Message = JobMessage | MonitorMessage | ElasticMessage


def decode(line: bytes) -> Message:
    """The message in a line. Raises ValueError: there is none."""
    message: Message = codec.decode_union(line, Message)
    return message
