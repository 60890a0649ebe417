"""Codecs: compressed forms in which gradients are sent."""

from __future__ import annotations

from collections.abc import Callable

from torchmn.base.errors import raise_if_unknown
from torchmn.base.names import CodecName
from torchmn.comm.codecs.base import Codec, StripeCodec
from torchmn.comm.codecs.error_feedback import ErrorFeedback
from torchmn.comm.codecs.half_precision import BFloat16, Float16
from torchmn.comm.codecs.layout import Layout
from torchmn.comm.codecs.power_sgd import PowerSGD
from torchmn.comm.codecs.quantized import Quantized
from torchmn.comm.codecs.residuals import reshard

__all__ = [
    "CODECS",
    "BFloat16",
    "Codec",
    "CodecName",
    "ErrorFeedback",
    "Float16",
    "Layout",
    "PowerSGD",
    "Quantized",
    "StripeCodec",
    "create_codec",
    "reshard",
]


CODECS: dict[str, Callable[[], Codec] | None] = {
    "float32": None,  # uncompressed
    "float16": Float16,
    "bfloat16": BFloat16,
    "int8": lambda: ErrorFeedback(Quantized(bits=8)),
    "int4": lambda: ErrorFeedback(Quantized(bits=4)),
    "int2": lambda: ErrorFeedback(Quantized(bits=2)),
    "1bit": lambda: ErrorFeedback(Quantized(bits=1)),
    "power_sgd": PowerSGD,
}


def create_codec(codec: str | Codec | None) -> Codec | None:
    """Return a codec by name, or the given object. None means that tensors are sent uncompressed.

    Local. Raises UnknownNameError: the name is not in `CODECS`.

    Example:
        >>> torchmn.comm.codecs.create_codec("int8").bits
        8.0625
        >>> torchmn.comm.codecs.create_codec("float32") is None
        True
    """
    if codec is None or not isinstance(codec, str):
        return codec
    raise_if_unknown("codec", codec, CODECS)
    factory = CODECS[codec]
    return factory() if factory is not None else None
