"""Which ranks differ from which, as text."""

import torch

from torchmn.comm.checksums import checksum, describe_differences, differences, digest


def test_checksums_depend_on_every_bit_and_not_on_strides() -> None:
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)
    other = tensor.clone()
    assert checksum([tensor]) == checksum([other])
    assert checksum([tensor.t()]) == checksum([tensor.t().contiguous()])
    other.view(torch.int32)[2, 3] ^= 1
    assert checksum([tensor]) != checksum([other])
    assert digest(tensor) != digest(other)
    assert digest(tensor) == digest(tensor.numpy().tobytes())
    assert digest(b"ab") == digest(b"a", memoryview(b"b"))


def test_majority_and_minority() -> None:
    sums = [{"w": 1, "b": 5}, {"w": 2, "b": 5}, {"w": 1, "b": 5}, {"w": 1, "b": 5}]
    (difference,) = differences(sums)
    assert difference.name == "w"
    assert difference.groups == ((0, 2, 3), (1,))
    assert str(difference) == "'w': rank 1 differs from ranks 0, 2, 3"
    assert describe_differences([difference], 7).startswith(
        "replicas differ after step 7 in 'w': rank 1 "
    )


def test_no_majority() -> None:
    (difference,) = differences([{"w": 1}, {"w": 2}])
    assert str(difference) == "'w': rank 0, rank 1 have different values, with no majority"
    (difference,) = differences([{"w": 1}, {"w": 2}, {"w": 1}, {"w": 3}])
    assert str(difference) == "'w': rank 1, rank 3 differ from ranks 0, 2"


def test_equal_and_absent() -> None:
    assert differences([{"w": 1}, {"w": 1}]) == []
    assert differences([{"w": 1}, {}]) == []
    assert differences([{}]) == []


def test_many_differences_are_counted() -> None:
    found = differences([{f"p{i}": 0 for i in range(9)}, {f"p{i}": 1 for i in range(9)}])
    assert "; and in 4 more" in describe_differences(found)
