"""Messages between the processes of a job, a module per subject."""

from __future__ import annotations

from torchmn.control import codec
from torchmn.control.codec import encode
from torchmn.control.messages.elastic import ElasticMessage
from torchmn.control.messages.job import JobMessage
from torchmn.control.messages.monitor import MonitorMessage

__all__ = ["Message", "decode", "encode"]

Message = JobMessage | MonitorMessage | ElasticMessage


def decode(line: bytes) -> Message:
    """The message in a line. Raises ValueError: there is none."""
    message: Message = codec.decode_union(line, Message)
    return message
