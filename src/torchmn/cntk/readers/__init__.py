"""Minibatch sources: deserializers of files, shuffled in a window, divided among the ranks."""

from torchmn.cntk.readers.ctf import CTFDeserializer
from torchmn.cntk.readers.deserializer import (
    CBFDeserializer,
    Chunk,
    ChunkInfo,
    Deserializer,
    HTKFeatureDeserializer,
    HTKMLFDeserializer,
    LatticeDeserializer,
    Record,
    StreamDef,
    StreamDefs,
    StreamInformation,
)
from torchmn.cntk.readers.images import Base64ImageDeserializer, ImageDeserializer
from torchmn.cntk.readers.mean_image import read_mean_image, write_mean_image
from torchmn.cntk.readers.minibatch import MinibatchData
from torchmn.cntk.readers.minibatch_iterator import MinibatchIterator
from torchmn.cntk.readers.minibatch_plan import FULL_DATA_SWEEP, INFINITELY_REPEAT
from torchmn.cntk.readers.minibatch_source import (
    MinibatchSource,
    MinibatchSourceFromData,
    as_minibatch_source,
)
from torchmn.cntk.readers.user import UserDeserializer, UserMinibatchSource

__all__ = [
    "FULL_DATA_SWEEP",
    "INFINITELY_REPEAT",
    "Base64ImageDeserializer",
    "CBFDeserializer",
    "CTFDeserializer",
    "Chunk",
    "ChunkInfo",
    "Deserializer",
    "HTKFeatureDeserializer",
    "HTKMLFDeserializer",
    "ImageDeserializer",
    "LatticeDeserializer",
    "MinibatchData",
    "MinibatchIterator",
    "MinibatchSource",
    "MinibatchSourceFromData",
    "Record",
    "StreamDef",
    "StreamDefs",
    "StreamInformation",
    "UserDeserializer",
    "UserMinibatchSource",
    "as_minibatch_source",
    "read_mean_image",
    "write_mean_image",
]
