"""Tests run where numba is missing too; only `test_kernels` asks for it."""

import pytest


@pytest.fixture(autouse=True)
def _slow_kernels_are_fine(request: pytest.FixtureRequest) -> None:
    mark = pytest.mark.filterwarnings("ignore:Gradients on cpu are quantized by plain torch")
    request.node.add_marker(mark)
