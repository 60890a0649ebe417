"""In which form gradients travel."""

from torchmn.compression.base import StripeCodec
from torchmn.compression.create import CODECS, create_codec
from torchmn.compression.reduced_precision import BFloat16, Float16

__all__ = ["CODECS", "BFloat16", "Float16", "StripeCodec", "create_codec"]
