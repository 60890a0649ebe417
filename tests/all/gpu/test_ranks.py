"""Rank processes on GPUs: each function of `work`, over each library."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.all.gpu import work
from tests.all.gpu.ranks import NCCL_VARIABLE, Over, needed, own_nccl, run_work
from tests.all.processes.runner import Runner
from tests.limits import limit
from torchmn.comm.create import ROUTES
from torchmn.testing import run_ranks


def on_gpu(function: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of rank processes on a GPU."""
    is_missing = not torch.cuda.is_available()
    for mark in (
        pytest.mark.gpu,
        pytest.mark.processes,
        pytest.mark.timeout(200),
        pytest.mark.skipif(is_missing, reason="no CUDA device"),
    ):
        function = mark(function)
    return function


NCCL = pytest.param("nccl", marks=pytest.mark.several_gpus)
COLLECTIVES = ("collectives", "order_of_streams", "other_streams", "minibatch_sums")
TRAINING = (
    *("every_step", "chosen_by_measurement", "grad_scaler", "compiled", "resume"),
    *("codec_int8", "codec_int4", "codec_1bit"),
    *("codec_float16", "codec_power_sgd"),
    *("double_buffering", "eager_double_buffering"),
    *("diloco", "block_momentum"),
    *("batch_norm", "batch_norm_float32", "batch_norm_bfloat16", "batch_norm_float16", "chain"),
    *("clipped", "two_streams", "images_in_bfloat16", "out_of_memory"),
    *("compiled_reduce_overhead", "graphed_callables", "graph_by_hand"),
)
SHARDED = ("fully_sharded", "tensor_parallel")


@on_gpu
@pytest.mark.parametrize("function", COLLECTIVES)
@pytest.mark.parametrize("over", ["gloo", "mpi", NCCL])
def test_collectives(function: str, over: Over) -> None:
    run_work(function, over)


@on_gpu
@pytest.mark.parametrize("route", [name for name in ROUTES if name != "pure_nccl"])
@pytest.mark.parametrize("over", ["gloo", NCCL])
def test_sums_of_every_route(route: str, over: Over) -> None:
    run_work("sums", over, route=route)


@on_gpu
@pytest.mark.several_gpus
def test_sums_by_pure_nccl() -> None:
    run_work("sums", "nccl", route="pure_nccl")


@on_gpu
@pytest.mark.parametrize("function", TRAINING)
@pytest.mark.parametrize("over", ["gloo", NCCL])
def test_training(function: str, over: Over) -> None:
    run_work(function, over)


@on_gpu
@pytest.mark.several_gpus
@pytest.mark.parametrize(
    "function", ["collectives", "sums", "every_step", "codec_int8", "codec_1bit", "diloco", "chain"]
)
def test_three_ranks_over_nccl(function: str) -> None:
    run_work(function, "nccl", size=3)


@on_gpu
@pytest.mark.several_gpus
@pytest.mark.parametrize("function", SHARDED)
def test_sharded_models_over_nccl(function: str) -> None:
    run_work(function, "nccl", size=4)


@on_gpu
@pytest.mark.parametrize("over", ["gloo", NCCL])
def test_segments_of_the_allocator_that_grow(over: Over, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    run_work("codec_int8", over)


@on_gpu
@pytest.mark.parametrize("function", ["every_step", "codec_int8", "grad_scaler"])
def test_training_over_mpi(function: str) -> None:
    run_work(function, "mpi")


@on_gpu
@pytest.mark.parametrize("over", ["gloo", NCCL])
def test_ddp_hook(over: Over) -> None:
    run_work("ddp_hook", over)


@on_gpu
@pytest.mark.parametrize("over", ["gloo", "mpi"])
def test_parameter_server(over: Over) -> None:
    run_work("parameter_server", over, route="flat")


@on_gpu
@pytest.mark.parametrize("function", ["stuck_stream", "missing_rank"])
@pytest.mark.parametrize("over", ["gloo", "mpi", NCCL])
def test_what_hangs_is_an_error_in_time(function: str, over: Over) -> None:
    run_work(function, over, timeout_s=5)


@on_gpu
@pytest.mark.parametrize("over", ["gloo", "mpi"])
def test_nccl_is_not_used_by_ranks_that_share_a_gpu(over: Over) -> None:
    run_work("refuses_nccl", over)


STUCK = """
import torch, torchmn
comm = torchmn.create_communicator(timeout_s=torchmn.Timeout(5, 5, 5))
x = torch.ones(1000, device=comm.device)
comm.allreduce(x)
if comm.rank == 1:
    torch.cuda._sleep(60_000_000_000)
comm.allreduce(x)
"""


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    made = Runner(tmp_path)
    yield made
    made.close()


@on_gpu
def test_the_job_ends_and_names_the_rank_whose_stream_is_stuck(runner: Runner) -> None:
    missing = needed("mpi", 2)
    if missing is not None:
        pytest.skip(reason=missing)
    env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    script = runner.script(STUCK)
    process = runner.start("-n", "2", "--backend", "mpi", "--grace", "1", script, **env)
    _, err = process.communicate(timeout=limit(150))
    assert process.returncode
    assert "rank 1" in err
    assert "did not finish its own work within 5 s" in err


TRAINED = """
import torchmn
from tests.all.gpu import work
comm = torchmn.create_communicator("auto", quiet=True)
model = work.network(comm)
optimizer = torchmn.create_multi_node_optimizer(work.sgd(model), comm, model)
work.train(comm, model, optimizer, range({num_steps}))
if comm.rank == 0:
    print("trained", flush=True)
while {is_endless}:
    work.train(comm, model, optimizer, range(10))
comm.finalize()
"""


def on_cpus_and_over_nccl(function: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of a job: on CPUs, and on GPUs in `make check-gpu`."""
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    on_nccl = pytest.param("nccl", marks=[pytest.mark.gpu, pytest.mark.several_gpus, missing])
    for mark in (
        pytest.mark.processes,
        pytest.mark.slow,
        pytest.mark.timeout(200),
        pytest.mark.parametrize("backend", ["gloo", on_nccl]),
    ):
        function = mark(function)
    return function


def start(runner: Runner, backend: str, **options: object) -> subprocess.Popen[str]:
    """Start two ranks that train, over a library."""
    script = runner.script(TRAINED.format(**options))
    env = own_nccl() if backend == "nccl" else {}
    return runner.start("-n", "2", "--backend", backend, script, **env)


@on_cpus_and_over_nccl
def test_the_report_of_a_run_has_its_phases(backend: str, runner: Runner) -> None:
    process = start(runner, backend, num_steps=30, is_endless=False)
    _, err = process.communicate(timeout=limit(150))
    assert process.returncode == 0, err
    report = runner.start_python("-m", "torchmn", "report", "--text", "logs/latest")
    text, err = report.communicate(timeout=limit(60))
    assert report.returncode == 0, err
    assert "30 steps" in text, text
    for phase in ("forward", "backward", "optimizer"):
        assert phase in text, text


@on_cpus_and_over_nccl
def test_ctrl_c_ends_ranks_by_themselves(backend: str, runner: Runner) -> None:
    process = start(runner, backend, num_steps=3, is_endless=True)
    assert process.stdout is not None
    assert any("trained" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=limit(60))
    assert process.returncode == 130, err
    assert "killed" not in err, err


@on_gpu
@pytest.mark.several_gpus
def test_ranks_that_pretend_to_be_on_hosts_of_their_own_over_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The way for torch's NCCL if it is older than 2.30, whatever `check` was given."""
    monkeypatch.delenv(NCCL_VARIABLE, raising=False)
    run_work("sums", "nccl")


# ---- the same functions on CPUs, in the ordinary tests: the checks themselves are right ----

IN_PROCESSES = ("resume", "ddp_hook", "missing_rank")  # of which threads would share the world
OF_COMPILERS = ("compiled",)  # a minute, and tests/scripts has it


@pytest.mark.parametrize(
    "function",
    [
        name
        for name in (*COLLECTIVES, "sums", *TRAINING, "parameter_server")
        if name not in (*IN_PROCESSES, *OF_COMPILERS)
    ],
)
def test_on_cpus(function: str) -> None:
    run_ranks(getattr(work, function), 2)


@pytest.mark.processes
@pytest.mark.parametrize("function", IN_PROCESSES)
def test_on_cpus_in_processes(function: str) -> None:
    run_work(function, "gloo", timeout_s=3 if function == "missing_rank" else 60)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("function", SHARDED)
def test_sharded_models_on_cpus(function: str) -> None:
    run_work(function, "gloo", size=4)
