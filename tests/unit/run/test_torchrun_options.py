"""What torchrun's options mean, and that all of them are known."""

from __future__ import annotations

import pytest
import typer
from torch.distributed.run import get_args_parser

from torchmn.cli.app import app
from torchmn.errors import UnsupportedError, UsageError
from torchmn.run.torchrun_options import translate

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def translated(env: dict[str, str] | None = None, **options: object) -> dict[str, object]:
    return translate(options, NO_GPU if env is None else env)[0]


def own_parameters() -> list[object]:
    return typer.main.get_command(app).commands["run"].params  # type: ignore[attr-defined]


def test_every_option_of_the_installed_torchrun_is_known() -> None:
    ours = {flag: each for each in own_parameters() for flag in each.opts}  # type: ignore[attr-defined]
    for action in get_args_parser()._actions:
        for flag in action.option_strings:
            if flag not in ("-h", "--help"):
                own = ours[flag.replace("_", "-") if flag.startswith("--") else flag]
                assert bool(own.is_flag) == (action.nargs == 0), flag


def test_variables_of_torchrun_replace_its_options() -> None:
    ours = {flag: each for each in own_parameters() for flag in each.opts}  # type: ignore[attr-defined]
    for action in get_args_parser()._actions:
        if type(action).__name__ in ("env", "check_env") and action.option_strings:
            longest = action.option_strings[-1].replace("_", "-")
            assert ours[longest].envvar == f"PET_{action.dest.upper()}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_ranks": "3"}, {"num_ranks": 3}),
        ({"per_node": "2", "nnodes": "1"}, {"per_node": 2, "num_nodes": 1}),
        ({"nnodes": "1:1", "node_rank": 0, "master_addr": "127.0.0.1"}, {"num_nodes": 1}),
        ({"standalone": True, "rdzv_endpoint": "localhost:0"}, {"num_nodes": 1}),
        ({"nnodes": "2", "hosts": "a,b"}, {"num_nodes": 2, "hosts": "a,b"}),
        ({"nnodes": "1:4"}, {"elastic": "1:4"}),
        ({"nnodes": "1:4", "rdzv_conf": "join_timeout=7"}, {"elastic": "1:4:7"}),
        ({"tee": "3", "run_path": True, "rdzv_id": "x"}, {}),
        (
            {"nnodes": "2", "node_rank": 1, "master_addr": "a", "master_port": 29501},
            {
                "elastic": "2:2",
                "has_fixed_hosts": True,
                "meeting": ("a", 29501),
                "max_restarts": 0,
                "node_rank": 1,
            },
        ),
        (
            {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "[::1]", "max_restarts": 2},
            {
                "elastic": "2:2",
                "has_fixed_hosts": True,
                "meeting": ("::1", 29400),
                "max_restarts": 2,
                "node_rank": None,
            },
        ),
        (
            {"nnodes": "1:4", "rdzv_endpoint": "a:29999", "rdzv_conf": "read_timeout=9,timeout=8"},
            {"elastic": "1:4:8", "meeting": ("a", 29999), "node_rank": None},
        ),
        (
            {"elastic": "1:4", "master_addr": "a"},
            {"elastic": "1:4", "meeting": ("a", 29500), "node_rank": None},
        ),
    ],
)
def test_options(options: dict[str, object], expected: dict[str, object]) -> None:
    assert translated(**options) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_ranks": "two"}, "-n must be a whole number, gpu, cpu or auto, got 'two'"),
        ({"num_ranks": "p"}, "The option is -n, not -np"),
        ({"num_ranks": "gpu"}, r"this host has no CUDA GPU \(CUDA_VISIBLE_DEVICES=''\)"),
        ({"num_ranks": "cpu", "hosts": "a,b"}, "not those of the hosts that --hosts"),
        ({"nnodes": "2:1"}, "--nnodes must be N, or MIN:MAX"),
        ({"nnodes": "two"}, "--nnodes must be N, or MIN:MAX"),
        ({"nnodes": "2", "standalone": True}, "--standalone means one host"),
        ({"nnodes": "2", "num_nodes": 3}, "--nnodes 2 contradicts --nodes 3"),
        ({"nnodes": "2:3", "elastic": "2:3"}, "are the same: use one"),
        ({"nnodes": "2", "node_rank": 2, "master_addr": "a"}, "from 0 to 1, got 2"),
        ({"nnodes": "2", "node_rank": 1}, "give all of them its address with --master-addr"),
        ({"node_rank": 1, "master_addr": "a"}, "say how many there are with --nnodes"),
        ({"nnodes": "2", "master_addr": "a", "hosts": "a,b"}, "use one of them"),
        ({"nnodes": "2", "rdzv_endpoint": "a:b:c"}, "--rdzv-endpoint must be HOST:PORT"),
        ({"nnodes": "2", "rdzv_endpoint": "a:65536"}, "--master-port must be from 1 to 65535"),
        ({"local_ranks_filter": "0,x"}, "must be a list of local ranks"),
    ],
)
def test_invalid_values(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        translated(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rdzv_backend": "etcd"}, "--rdzv-backend etcd is not supported"),
        ({"virtual_local_rank": True}, "use comm.device"),
        ({"duplicate_stdout_filters": "loss"}, "in its own file"),
    ],
)
def test_what_has_no_equivalent_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        translated(**options)


def test_what_has_no_effect_is_said() -> None:
    _, notes = translate({"role": "trainer", "rdzv_conf": "read_timeout=3"}, NO_GPU)
    assert notes == ("--role has no effect: all ranks have the same role.",)
    assert translate({"nnodes": "1", "master_port": 29501, "tee": "3"}, NO_GPU)[1] == ()


def test_devices_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchmn.run.torchrun_options.count_gpus", lambda env: 4)
    for word in ("gpu", "auto"):
        assert translated(num_ranks=word) == {"num_ranks": None, "per_node": 4}
        assert translated(per_node=word) == {"per_node": 4}
    monkeypatch.setattr("torchmn.run.torchrun_options.count_gpus", lambda env: 0)
    assert translated(per_node="auto") == translated(per_node="cpu")
    assert translated(per_node="cpu")["per_node"] >= 1  # type: ignore[operator]


def test_output_that_is_not_shown() -> None:
    assert translated(local_ranks_filter="0,2") == {"shown": {0, 2}}
    assert "shown" not in translated(local_ranks_filter="", redirects="3")
