import pytest

from torchmn.errors import UnsupportedError, UsageError
from torchmn.run.elastic.job import parse_elastic
from torchmn.run.job import Job
from torchmn.run.plan import RunOptions, plan_job
from torchmn.run.start import dry_run


def run_options(**more: object) -> RunOptions:
    return RunOptions(**{"argv": ("true",), "elastic": "1:1", "backend": "gloo", **more})  # type: ignore[arg-type]


def planned(options: RunOptions) -> Job:
    return plan_job(options, {})[0]


@pytest.mark.parametrize("text", ["", "2", ":", "a:b", "2:", "-1:2", "1:2:", "1:2:3:4"])
def test_invalid_host_range(text: str) -> None:
    with pytest.raises(UsageError, match="--elastic must be MIN:MAX"):
        parse_elastic(text)


def test_one_machine_is_one_host() -> None:
    job = planned(run_options(num_ranks=4, max_restarts=7))
    assert [str(host) for host in job.hosts] == ["localhost:4"]
    limits = job.limits
    assert limits is not None
    assert (limits.min_hosts, limits.max_hosts, limits.max_restarts) == (1, 1, 7)
    with pytest.raises(UsageError, match="there are 1.*--hosts.*--elastic 1:1"):
        planned(run_options(elastic="2:4", num_ranks=4))


def test_several_hosts_keep_their_names() -> None:
    job = planned(run_options(elastic="1:2", hosts="a:2,b:4"))
    assert [str(host) for host in job.hosts] == ["a:2", "b:4"]
    with pytest.raises(UsageError, match="asks for up to 3 hosts, but there are 2"):
        planned(run_options(elastic="1:3", hosts="a:2,b:4"))
    with pytest.raises(UsageError, match="there are 1.* Use --elastic 1:1, or name more"):
        planned(run_options(elastic="2:4", hosts="a:2"))


@pytest.mark.parametrize("more", [{"backend": "mpi"}, {"launcher": "mpirun"}])
def test_mpi_raises(more: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError, match="MPI_COMM_WORLD is fixed"):
        planned(run_options(**more))


def test_launchers_with_fixed_hosts_raise() -> None:
    with pytest.raises(UnsupportedError, match="srun has a fixed set"):
        planned(run_options(launcher="srun"))
    with pytest.raises(UnsupportedError, match="Arguments of --launcher"):
        planned(run_options(launcher_args=("-x",)))


def test_restarts_alone_are_on_the_same_hosts() -> None:
    for more, hosts in (({"num_ranks": 2}, "1:1"), ({"hosts": "a:2,b:2"}, "2:2")):
        options = run_options(elastic=None, max_restarts=2, **more)
        limits = planned(options).limits
        assert limits is not None
        assert limits.max_restarts == 2
        assert f"{limits.min_hosts}:{limits.max_hosts}" == hosts
    assert planned(run_options(elastic=None, max_restarts=0)).limits is None


def test_the_time_to_wait_for_hosts() -> None:
    limits = planned(run_options(elastic="1:1:7")).limits
    assert limits is not None
    assert limits.join_timeout_s == 7.0


def test_dry_run_does_not_show_the_secret() -> None:
    job = planned(run_options(elastic="1:2", hosts="10.9.9.1:1,10.9.9.2:1"))
    shown = dry_run(job, {"PATH": "/bin"})
    assert shown.count("torchmn.run.elastic.host_main") == 2
    assert "10.9.9.2" in shown
    assert job.secret not in shown
