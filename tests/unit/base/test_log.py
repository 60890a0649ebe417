"""Messages of torchmn arrive once: at the handlers of a script, or else on standard error."""

import logging
import subprocess
import sys
import textwrap

import pytest

import torchmn
from tests.limits import limit
from torchmn.base.log import Log
from torchmn.testing import run_ranks

# Each program runs in a process of its own: pytest has a handler at the root logger.
SAYS = """
from torchmn.base.log import Log
log = Log("torchmn.comm.create", rank=2, size=4, host="node7")
def say():
    log.debug("the %s", "details")
    log.info("auto selected %s\\ntried: others", "every_step")
    log.warning("slow")
"""
SHOWN = "torchmn: auto selected every_step\ntorchmn: tried: others\ntorchmn: slow\n"


def stderr_of(program: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SAYS + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path), **env},
        timeout=limit(30),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


def test_nothing_is_configured() -> None:
    program = """
    import logging
    say()
    loggers = [logging.getLogger(name) for name in ("", "torchmn", "torchmn.comm.create")]
    assert not any(logger.handlers for logger in loggers)
    assert [logger.level for logger in loggers] == [logging.WARNING, 0, 0]
    """
    assert stderr_of(program) == SHOWN


CONFIGURED = [
    ("logging.basicConfig()", "WARNING:torchmn.comm.create:slow\n"),
    (
        "logging.basicConfig(level='INFO', format='%(rank)s of %(world_size)s %(host)s')",
        "2 of 4 node7\n2 of 4 node7\n",
    ),
    # One handler below the root, which every library may have.
    (
        "logger = logging.getLogger('torchmn')\n"
        "logger.addHandler(logging.StreamHandler())\n"
        "logger.setLevel('INFO')",
        "auto selected every_step\ntried: others\nslow\n",
    ),
    ("logging.getLogger('torchmn').addHandler(logging.NullHandler())", ""),
    ("logging.getLogger('torchmn').setLevel('WARNING')", "torchmn: slow\n"),
    ("logging.getLogger('torchmn.comm').setLevel('ERROR')", ""),
    ("logging.getLogger('torchmn.data').setLevel('ERROR')", SHOWN),
    (
        "logging.getLogger('torchmn.comm.create').setLevel('DEBUG')",
        f"torchmn: the details\n{SHOWN}",
    ),
    ("logging.disable(logging.INFO)", "torchmn: slow\n"),
    ("import sys; sys.stderr = None", ""),
    ("import sys; sys.stderr.close()", ""),
]


@pytest.mark.parametrize(("lines", "expected"), CONFIGURED)
def test_what_the_script_configures_counts(lines: str, expected: str) -> None:
    """Before or after the import, and only once."""
    assert stderr_of(f"import logging\n{lines}\nsay()") == expected


def test_it_may_be_configured_at_any_time() -> None:
    program = "say()\nimport logging\nlogging.basicConfig(format='own: %(message)s')\nsay()"
    assert stderr_of(program) == f"{SHOWN}own: slow\n"


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", f"torchmn: the details\n{SHOWN}"),
        ("info", SHOWN),
        ("WARNING", "torchmn: slow\n"),
        ("error", ""),
        (
            "loud",
            "torchmn: TORCHMN_LOG=loud is not used: it must be debug or info or warning or "
            f"error.\n{SHOWN}",
        ),
    ],
)
def test_the_environment_variable(level: str, expected: str) -> None:
    assert stderr_of("say()", TORCHMN_LOG=level) == expected


def test_the_variable_counts_for_the_handlers_of_a_script() -> None:
    program = "import logging\nlogging.basicConfig(format='%(message)s')\nsay()"
    assert stderr_of(program, TORCHMN_LOG="debug").count("the details") == 1


def test_a_record_names_the_place_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "torchmn"):
        Log("torchmn.base", rank=1, size=3, host="a").info("x", extra={"step": 7})
    (record,) = caplog.records
    assert record.filename == "test_log.py"
    assert record.funcName == "test_a_record_names_the_place_of_the_call"
    places = ("rank", "world_size", "host", "step")
    assert [getattr(record, name) for name in places] == [1, 3, "a", 7]


def test_the_rank_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "5")
    Log("torchmn.record").warning("x")
    assert [getattr(record, "rank", None) for record in caplog.records] == [5]


def test_rank_0_alone_logs(caplog: pytest.LogCaptureFixture) -> None:
    def train(comm: torchmn.Communicator) -> None:
        comm.logger("train").warning("of rank 0")
        comm.logger("train", all_ranks=True).warning("of rank %d", comm.rank)
        assert comm.logger("train").isEnabledFor(logging.WARNING) is (comm.rank == 0)

    run_ranks(train, 3)
    texts = sorted(record.getMessage() for record in caplog.records if record.name == "train")
    assert texts == ["of rank 0", "of rank 0", "of rank 1", "of rank 2"]
    assert {getattr(record, "world_size", None) for record in caplog.records} == {3}


def test_exceptions_are_shown() -> None:
    program = """
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("it failed")
    """
    lines = stderr_of(program).splitlines()
    assert lines[0] == "torchmn: it failed"
    assert lines[-1] == "torchmn: ZeroDivisionError: division by zero"


def test_messages_of_the_script_have_no_prefix() -> None:
    assert stderr_of('Log("train").info("epoch 1")') == "epoch 1\n"


def test_a_replaced_standard_error() -> None:
    program = """
    import io, sys
    shown, sys.stderr = sys.stderr, io.StringIO()
    say()
    assert sys.stderr.getvalue().count("slow") == 1
    sys.stderr = shown
    """
    assert stderr_of(program) == ""
