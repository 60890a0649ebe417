"""Gradient compression codecs."""

from torchmn.comm.codecs.base import Codec, StripeCodec
from torchmn.comm.codecs.create import CODECS, create_codec
from torchmn.comm.codecs.error_feedback import ErrorFeedback
from torchmn.comm.codecs.half_precision import BFloat16, Float16
from torchmn.comm.codecs.layout import Layout, Segment
from torchmn.comm.codecs.power_sgd import PowerSGD
from torchmn.comm.codecs.quantized import Quantized
from torchmn.comm.codecs.residuals import reshard

__all__ = [
    "CODECS",
    "BFloat16",
    "Codec",
    "ErrorFeedback",
    "Float16",
    "Layout",
    "PowerSGD",
    "Quantized",
    "Segment",
    "StripeCodec",
    "create_codec",
    "reshard",
]
