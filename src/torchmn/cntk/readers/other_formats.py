"""CNTK's deserializers that are not here, so that a ported script learns what to use."""

from __future__ import annotations

from typing import NoReturn

from torchmn.errors import UnsupportedError

_ARRAYS = (
    "Convert the files once, with a library that reads them, to arrays for MinibatchSourceFromData "
    "or to a CTF file; or write a UserDeserializer around that library."
)


def CBFDeserializer(*_: object, **__: object) -> NoReturn:
    """CNTK's binary format, which only CNTK writes. Raises UnsupportedError.

    >>> torchmn.cntk.readers.CBFDeserializer("train.cbf")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    torchmn.errors.UnsupportedError: ...
    """
    raise UnsupportedError(
        "CNTK's binary format (CBF) is not read. Give the CTF text that the file was made from to "
        "CTFDeserializer, which parses it faster than CNTK does. Where samples should be in memory "
        "as numbers, torchmn.scatter_dataset packs them once for all ranks of a node."
    )


def HTKFeatureDeserializer(*_: object, **__: object) -> NoReturn:
    """Acoustic features of HTK. Raises UnsupportedError.

    >>> torchmn.cntk.readers.HTKFeatureDeserializer()  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    torchmn.errors.UnsupportedError: ...
    """
    raise UnsupportedError(f"Acoustic features of HTK are not read. {_ARRAYS}")


def HTKMLFDeserializer(*_: object, **__: object) -> NoReturn:
    """Label files of HTK. Raises UnsupportedError.

    >>> torchmn.cntk.readers.HTKMLFDeserializer()  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    torchmn.errors.UnsupportedError: ...
    """
    raise UnsupportedError(f"Label files of HTK are not read. {_ARRAYS}")


def LatticeDeserializer(*_: object, **__: object) -> NoReturn:
    """Lattices of HTK. Raises UnsupportedError.

    >>> torchmn.cntk.readers.LatticeDeserializer()  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    torchmn.errors.UnsupportedError: ...
    """
    raise UnsupportedError(f"Lattices are not read. {_ARRAYS}")
