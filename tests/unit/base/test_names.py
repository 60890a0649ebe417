"""The types of names are the names that are registered."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from torchmn.base import names
from torchmn.comm.codecs import CODECS
from torchmn.comm.create import ROUTES
from torchmn.comm.transports.join import TRANSPORTS, TransportName
from torchmn.exchange.optimizer.create import SCHEDULES
from torchmn.run.backend import BACKENDS
from torchmn.run.launch_local import LocalBackend

REGISTRIES: dict[str, tuple[Any, Any, Any]] = {
    "routes": (names.RouteName, ROUTES, names.ROUTE_TRAITS),
    "codecs": (names.CodecName, CODECS, names.CODEC_TRAITS),
    "schedules": (names.ScheduleName, SCHEDULES, names.SCHEDULE_TRAITS),
}


@pytest.mark.parametrize("kind", REGISTRIES)
def test_type_is_registry(kind: str) -> None:
    name, registry, traits = REGISTRIES[kind]
    assert [*get_args(name)] == [*registry] == [*traits]


def test_types_of_transports_and_backends() -> None:
    assert get_args(TransportName) == TRANSPORTS
    assert {*get_args(LocalBackend)} == {*BACKENDS} - {"mpi"}
