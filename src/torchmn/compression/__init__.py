"""Gradient compression codecs."""

from torchmn.compression.base import Codec, StripeCodec
from torchmn.compression.create import CODECS, create_codec
from torchmn.compression.error_feedback import ErrorFeedback
from torchmn.compression.half_precision import BFloat16, Float16
from torchmn.compression.layout import Layout, Segment
from torchmn.compression.power_sgd import PowerSGD
from torchmn.compression.quantized import Quantized
from torchmn.compression.residuals import reshard

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
