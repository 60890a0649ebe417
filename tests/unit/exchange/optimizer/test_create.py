"""Names and combinations that `create_multi_node_optimizer` takes and refuses."""

from __future__ import annotations

import pytest

from tests.ranks import on_ranks
from tests.unit.models import mlp, optimizer_of
from torchmn.cluster import Topology
from torchmn.errors import UnknownNameError, UnsupportedError, UsageError
from torchmn.exchange.optimizer.create import SCHEDULES
from torchmn.exchange.schedules import DoubleBuffering
from torchmn.testing import run_ranks


def wrap(comm, **options):
    model = mlp()
    return optimizer_of(comm, model, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "sometimes"}, "Unknown schedule 'sometimes'. Known: auto, every_step"),
        ({"codec": "int3"}, "Unknown codec 'int3'. Known: float32, float16, bfloat16"),
        ({"weight": "tokens"}, "Unknown weight 'tokens'. Known: rank, samples"),
    ],
)
@on_ranks(1)
def test_unknown_names_list_the_known_ones(comm, options: dict, text: str) -> None:
    with pytest.raises(UnknownNameError, match=text):
        wrap(comm, **options)


@on_ranks(1)
def test_two_schedules_at_once_are_refused(comm) -> None:
    with pytest.raises(UnsupportedError, match="contradict each other"):
        wrap(comm, double_buffering=True, schedule="every_step")


@on_ranks(2)
def test_a_schedule_by_name_by_flag_and_as_object(comm) -> None:
    assert wrap(comm).schedule.name == "every_step"
    assert wrap(comm, double_buffering=True).schedule.name == "double_buffering"
    assert wrap(comm, schedule="double_buffering").schedule.name == "double_buffering"
    given = DoubleBuffering()
    assert wrap(comm, schedule=given).schedule is given
    assert all(make().name == name for name, make in SCHEDULES.items())


@on_ranks(2, allreduce_grad_dtype="bfloat16")
def test_the_codec_comes_from_the_communicator_unless_given(comm) -> None:
    assert wrap(comm).reducer.codec.name == "bfloat16"
    with pytest.raises(UnsupportedError, match="Give one of the two"):
        wrap(comm, codec="float16")


def test_power_sgd_is_refused_where_parameters_are_cut() -> None:
    with pytest.raises(UnsupportedError, match="needs whole parameters"):
        run_ranks(lambda comm: wrap(comm, codec="power_sgd"), 2, name="two_dimensional")


@pytest.mark.parametrize("max_grad_norm", [0.0, -1.0, float("nan")])
def test_a_norm_must_be_positive(max_grad_norm: float) -> None:
    with pytest.raises(UsageError, match="must be a positive number"):
        run_ranks(lambda comm: wrap(comm, max_grad_norm=max_grad_norm), 1)


class TestWhatIsEncoded:
    """A codec that does nothing warns, with the cure."""

    @pytest.mark.parametrize("codec", ["1bit", "int8", "float16", "power_sgd"])
    @pytest.mark.parametrize("name", ["single_node", "hierarchical", "non_cuda_aware"])
    def test_all_ranks_on_one_node(self, name: str, codec: str) -> None:
        text = r"encodes nothing here.*all 2 ranks are on one.*create_communicator\('flat'\)"
        with pytest.warns(UserWarning, match=text) as caught:
            texts = run_ranks(lambda comm: repr(wrap(comm, codec=codec)), 2, name=name)
        assert len(caught) == 1  # rank 0 alone
        assert all("between no ranks" in text for text in texts)

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize(
        ("name", "nodes", "between"),
        [
            ("flat", [2], "all 2 ranks"),
            ("naive", [2], "all 2 ranks"),
            ("hierarchical", [1, 1], "the 2 nodes"),
            ("two_dimensional", [1, 1], "the 2 nodes"),
        ],
    )
    def test_where_it_does_something(self, name: str, nodes: list[int], between: str) -> None:
        topology = Topology.blocks(nodes)
        for text in run_ranks(
            lambda comm: repr(wrap(comm, codec="1bit")), 2, name=name, topology=topology
        ):
            assert f"between {between}" in text

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("options", [{}, {"codec": "float32"}])
    def test_where_no_warning_is_needed(self, options: dict[str, object]) -> None:
        run_ranks(lambda comm: wrap(comm, **options).close(), 2, name="hierarchical")
