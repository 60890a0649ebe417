from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchmn.cntk.readers import MinibatchSourceFromData, from_csv, from_pandas
from torchmn.errors import DataError, UnknownNameError, UsageError


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


# ---- CSV

TEXT = "age, size ,label\n1,2.5,0\n3,4,1\n\n5,1e-1,1\n"


def csv(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "t.csv"
    path.write_text(text, encoding=encoding)
    return path


def test_csv(tmp_path: Path) -> None:
    path = csv(tmp_path, TEXT, "utf-8-sig")
    source = from_csv(
        path,
        {"x": ["size", "age"], "y": "label"},
        dtypes={"y": np.int64},
        randomize=False,
        max_sweeps=1,
    )
    found = source.next_minibatch(10, {"x": "x", "y": "y"})
    assert torch.equal(found["x"].data, torch.tensor([[2.5, 1.0], [4.0, 3.0], [0.1, 5.0]]))
    assert found["y"].data.tolist() == [0, 1, 1]
    assert found["y"].data.dtype == torch.int64
    shuffled = from_csv(path, {"y": "age"}, randomization_seed=1, max_sweeps=1)
    assert sorted(whole(shuffled, "y").data.tolist()) == [1, 3, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv has no line"),
        ("a,b\n1,2\n3\n", "t.csv, line 3: 1 values where the first line names 2 columns"),
        ("a,b\n1,x\n", r"line 2, column 2 \(b\): 'x' is no finite number"),
        ("a,b\n1,\n", r"line 2, column 2 \(b\): '' is no"),
        ("a,b\n1,nan\n", r"line 2, column 2 \(b\): 'nan' is no finite"),
        ("a,b,b\n1,2,3\n", "several columns with the name 'b'"),
        ("a,b\n1_0,2\n", "column 1 .a.: '1_0' is no finite"),
        ('a,b\n1,"2\n', "t.csv cannot be read: unexpected end"),
    ],
)
def test_wrong_csv(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((DataError, UsageError), match=message):
        from_csv(csv(tmp_path, text), {"x": ["a", "b"]})


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ("0.5", "int64"),
        ("300", "uint8"),
        ("-1", "uint8"),
        ("2", "bool"),
        ("9007199254740993", "int64"),
        ("1e39", "float32"),
        ("70000", "float16"),
    ],
)
def test_a_value_that_its_type_cannot_hold(tmp_path: Path, value: str, dtype: str) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(f"a,b\r\n1,1\r\n2,{value}\r\n".encode())
    with pytest.raises(DataError, match=f"stream 'y' has the value .* which {dtype} cannot hold"):
        from_csv(path, {"x": "a", "y": "b"}, dtypes={"y": dtype})


def test_a_csv_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing.csv cannot be read"):
        from_csv(tmp_path / "missing.csv", {"x": "a"})
    with pytest.raises(UnknownNameError, match="column of .*t.csv 'c'. Known: a, b"):
        from_csv(csv(tmp_path, "a,b\n1,2\n"), {"x": "c"})
    with pytest.raises(UnknownNameError, match="stream in dtypes 'y'. Known: x"):
        from_csv(csv(tmp_path, "a,b\n1,2\n"), {"x": "a"}, dtypes={"y": "int64"})
    path = tmp_path / "latin.csv"
    path.write_bytes(b"a,b\n\xff,1\n")
    with pytest.raises(DataError, match="cannot be read"):
        from_csv(path, {"x": "a"})


# ---- pandas


class Frame:
    """What `from_pandas` uses of a DataFrame; pandas need not be installed."""

    def __init__(self, **columns: Any) -> None:
        self.values = {name: np.asarray(value) for name, value in columns.items()}
        self.columns = list(columns)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def frames() -> list[Any]:
    try:
        import pandas
    except ImportError:
        return [Frame]
    return [Frame, lambda **columns: pandas.DataFrame(columns)]


@pytest.mark.parametrize("frame", frames())
def test_pandas(frame: Any) -> None:
    table = frame(a=[1.0, 2.0, 3.0], b=[4, 5, 6], c=["x", "y", "z"], d=[1.0, np.nan, 2.0])
    source = from_pandas(table, {"x": ["b", "a"]}, randomize=False, max_sweeps=1)
    assert whole(source).data.tolist() == [[4, 1], [5, 2], [6, 3]]
    with pytest.raises(DataError, match="Column 'c' of the DataFrame has the type.*factorize"):
        from_pandas(table, {"x": "c"})
    with pytest.raises(DataError, match="Column 'd' of the DataFrame has nan in row 1, and 1 such"):
        from_pandas(table, {"x": "d"})
    with pytest.raises(UnknownNameError, match="Known: a, b, c, d"):
        from_pandas(table, {"x": "e"})
