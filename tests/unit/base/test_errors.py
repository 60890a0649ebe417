"""Errors are those of `torchmn.errors`, from where users import them."""

from __future__ import annotations

import pickle

import pytest

import torchmn.errors
from torchmn.base import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_users_find_it_in_torchmn_errors(name: str) -> None:
    error = getattr(errors, name)
    assert getattr(torchmn.errors, name) is error
    assert error.__module__ == "torchmn.errors"  # as tracebacks show it
    assert pickle.loads(pickle.dumps(error)) is error
