"""The YAML that is written is read as the same values."""

from __future__ import annotations

import pytest

from torchmn.launch.submit.yaml_text import Value, documents

yaml = pytest.importorskip("yaml", reason="no PyYAML")

VALUES: list[Value] = [
    {"plain": "word", "number": 3, "yes": True, "no": False, "image": "registry.io/a/b:1.0"},
    {"text": ["", "-n", "2", "3.5", "on", "Null", "a: b", "a #b", "it's", '"', "*x", "ü", "a\nb"]},
    {"nested": [{"a": 1, "b": {"c": [{"d": "e"}, {}]}}, []], "empty": {}, "none": []},
    {"key with blank": "x", "true": "x", "app.kubernetes.io/name": "x", "nvidia.com/gpu": 4},
    {"times": ["12:30:45", "2001-01-01", "0x10", "1e3", "~", ".5"], "trailing": "a:"},
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_reader_finds_the_same(value: Value) -> None:
    assert yaml.safe_load(documents([value])) == value


def test_several_documents() -> None:
    assert list(yaml.safe_load_all(documents(VALUES))) == VALUES


def test_words_stay_readable() -> None:
    text = documents([{"kind": "Job", "image": "registry.io/a/b:1.0", "args": ["run", "train.py"]}])
    assert text == "kind: Job\nimage: registry.io/a/b:1.0\nargs:\n- run\n- train.py\n"
