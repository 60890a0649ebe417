"""Names and combinations that `create_multi_node_optimizer` takes and refuses."""

from __future__ import annotations

import pytest
import torch

from torchmn import create_multi_node_optimizer
from torchmn.errors import UnknownNameError, UnsupportedError
from torchmn.exchange import SCHEDULES, DoubleBuffering
from torchmn.testing import run_ranks

from .models import mlp


def wrap(comm, **options):
    model = mlp()
    return create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), 0.1), comm, model, **options
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "sometimes"}, "Unknown schedule 'sometimes'. Known: every_step, double_"),
        ({"codec": "int3"}, "Unknown codec 'int3'. Known: float32, float16, bfloat16"),
        ({"weight": "tokens"}, "Unknown weight 'tokens'. Known: rank, samples"),
    ],
)
def test_unknown_names_list_the_known_ones(options: dict, text: str) -> None:
    def rank_main(comm):
        with pytest.raises(UnknownNameError, match=text):
            wrap(comm, **options)

    run_ranks(rank_main, 1)


def test_two_schedules_at_once_are_refused() -> None:
    def rank_main(comm):
        with pytest.raises(UnsupportedError, match="contradict each other"):
            wrap(comm, double_buffering=True, schedule="every_step")

    run_ranks(rank_main, 1)


def test_a_schedule_by_name_by_flag_and_as_object() -> None:
    def rank_main(comm):
        assert wrap(comm).schedule.name == "every_step"
        assert wrap(comm, double_buffering=True).schedule.name == "double_buffering"
        assert wrap(comm, schedule="double_buffering").schedule.name == "double_buffering"
        given = DoubleBuffering()
        assert wrap(comm, schedule=given).schedule is given
        assert all(make().name == name for name, make in SCHEDULES.items())

    run_ranks(rank_main, 2)


def test_the_codec_comes_from_the_communicator_unless_given() -> None:
    def codec_of(optimizer):
        codec = getattr(optimizer.exchange.wire, "codec", None)
        return codec.name if codec else None

    def rank_main(comm):
        assert codec_of(wrap(comm)) == "bfloat16"
        assert codec_of(wrap(comm, codec="float16")) == "float16"
        assert codec_of(wrap(comm, codec="float32")) is None

    run_ranks(rank_main, 2, allreduce_grad_dtype="bfloat16")


@pytest.mark.parametrize("name", ["int8", "1bit"])
def test_codecs_that_do_not_travel_yet_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="cannot travel in it yet. Use float16"):
        run_ranks(lambda comm: wrap(comm, codec=name), 2)
