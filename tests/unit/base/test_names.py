"""The tables of names have the names of the classes, and need no torch."""

import subprocess
import sys

from tests.limits import limit
from torchmn.base.names import CODEC_TRAITS, ROUTE_TRAITS, SCHEDULE_TRAITS
from torchmn.comm.codecs import CODECS, create_codec
from torchmn.comm.create import ROUTES
from torchmn.exchange.optimizer.create import SCHEDULES


def test_the_registries_have_the_same_names() -> None:
    assert list(ROUTES) == list(ROUTE_TRAITS)
    assert list(CODECS) == list(CODEC_TRAITS)
    assert list(SCHEDULES) == list(SCHEDULE_TRAITS)


def test_traits_are_those_of_the_classes() -> None:
    for name, traits in CODEC_TRAITS.items():
        assert traits.is_lossy == (create_codec(name) is not None)
    for name, kind in SCHEDULE_TRAITS.items():
        assert (kind.model == "blocks") == (
            SCHEDULES[name]().traits.has_own_steps and name != "parameter_server"
        )


def test_they_need_no_torch() -> None:
    script = "import sys, torchmn.base.names\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=limit(20))
