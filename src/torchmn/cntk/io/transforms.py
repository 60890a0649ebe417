"""CNTK's ``cntk.io.transforms``: what an `ImageDeserializer` does to images."""

from torchmn.cntk.readers.transforms import color, crop, mean, scale

__all__ = ["color", "crop", "mean", "scale"]
