"""Marks of tests that need more than Python: what is missing is the reason of their skip."""

import pytest

from tests.netlab import missing_requirement

_NO_HOSTS = missing_requirement()
ON_TEST_HOSTS = [
    pytest.mark.processes,
    pytest.mark.root,
    pytest.mark.skipif(_NO_HOSTS is not None, reason=f"no test hosts: {_NO_HOSTS}"),
]
