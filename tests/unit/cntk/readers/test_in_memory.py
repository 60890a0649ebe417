from typing import Any

import numpy as np
import pytest
import torch

from torchmn.cntk.readers import MinibatchSourceFromData
from torchmn.errors import DataError, UsageError


def whole(source: MinibatchSourceFromData, name: str = "x") -> Any:
    return source.next_minibatch(1000, {"s": name})["s"]


def test_kinds_of_data() -> None:
    once = {"max_sweeps": 1}
    assert (
        whole(MinibatchSourceFromData({"x": np.ones((3, 2))}, **once)).data.dtype == torch.float32
    )
    assert whole(MinibatchSourceFromData({"x": np.arange(3)}, **once)).data.tolist() == [0, 1, 2]
    half = torch.ones(3, 1, dtype=torch.bfloat16)
    with pytest.raises(TypeError):
        half.numpy()
    sequences = whole(MinibatchSourceFromData({"x": [np.ones((2, 4)), np.ones((1, 4))]}, **once))
    assert sequences.lengths.tolist() == [2, 1]
    assert [len(s) for s in sequences.as_sequences()] == [2, 1]
    padded, mask = sequences.padded()
    assert padded.shape == (2, 2, 4)
    assert mask.tolist() == [[True, True], [True, False]]
    typed = whole(MinibatchSourceFromData({"x": (np.ones((3, 2)), "Tensor[2]")}, **once))
    assert typed.num_samples == 3


def test_sparse_data_of_all_kinds() -> None:
    dense = torch.tensor([[0.0, 2.0], [0.0, 0.0], [3.0, 0.0]])
    found = whole(MinibatchSourceFromData({"x": dense.to_sparse_csr()}, max_sweeps=1))
    assert torch.equal(found.data.to_dense(), dense)
    shuffled = MinibatchSourceFromData({"x": dense.to_sparse_csr()}, randomize=True, max_sweeps=1)
    rows = sorted(whole(shuffled).data.to_dense().tolist())
    assert rows == sorted(dense.tolist())
    scipy_sparse = pytest.importorskip("scipy.sparse")
    matrix = scipy_sparse.coo_matrix(dense.numpy())
    assert torch.equal(
        whole(MinibatchSourceFromData({"x": matrix}, max_sweeps=1)).data.to_dense(), dense
    )
    sequences = [scipy_sparse.csr_matrix(np.eye(n, 4)) for n in (2, 3)]
    found = whole(MinibatchSourceFromData({"x": sequences}, max_sweeps=1))
    assert found.lengths.tolist() == [2, 3]
    assert found.data.shape == (5, 4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "no streams"),
        ({"x": np.ones(3), "y": np.ones(4)}, "x 3, y 4. All streams"),
        ({"x": "text"}, "'x' is a str"),
        ({"x": np.array(["a", "b"])}, "'x' is a ndarray"),
        ({"x": [1, 2, 3]}, "'x' is a list"),
        ({"x": torch.tensor(1.0)}, "'x' is a Tensor"),
    ],
)
def test_wrong_data(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MinibatchSourceFromData(data)


def test_no_samples() -> None:
    with pytest.raises(DataError, match="no sequence"):
        MinibatchSourceFromData({"x": np.ones((0, 2))}).next_minibatch(1)
