"""How fast the user's own script loads its data on each host.

The script runs up to the first DataLoader over which it iterates; from there on batches are only
taken and counted, for some seconds (`loading_main`). Training cannot be faster than this.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

from torchmn.control.codec import Record, decode
from torchmn.control.ports import find_free_port
from torchmn.control.processes import kill_on_parent_death, send_group
from torchmn.doctor.findings import Finding, slower_than_others
from torchmn.doctor.orders import Request

_RATIO = 0.6
_QUICK_S, _FULL_S = 3.0, 15.0
_START_S = 90.0


class LoadingFacts(Record, frozen=True, kw_only=True):
    """Rates after the first batch; ``error`` says why there are none."""

    samples_per_s: float = 0.0
    batches_per_s: float = 0.0
    first_batch_s: float = 0.0
    num_workers: int = 0
    error: str = ""


class LoadingCheck:
    """See this module."""

    name = "data_loading"
    facts = LoadingFacts
    is_measurement = True

    def examine(self, request: Request, host: str) -> LoadingFacts:
        """Run the script as a job of one rank."""
        if not request.script:
            return LoadingFacts()
        seconds = _FULL_S if request.is_full else _QUICK_S
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
        safe_path = ["-P"] if sys.version_info >= (3, 11) else []
        process = subprocess.Popen(
            [sys.executable, *safe_path, "-m", "torchmn.doctor.loading_main", str(seconds)]
            + request.script,
            cwd=request.cwd,
            env={**os.environ, **place, **rendezvous},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=kill_on_parent_death(),
        )
        try:
            output, errors = process.communicate(timeout=_START_S + seconds)
        except subprocess.TimeoutExpired:
            return LoadingFacts(error=f"no batch within {_START_S:g} s")
        finally:
            send_group(process.pid, signal.SIGKILL)  # its workers
            process.wait()
        for line in reversed(output.splitlines()):
            try:
                return decode(line, LoadingFacts)
            except ValueError:
                continue
        last = (errors or output).strip().splitlines()[-1:]
        return LoadingFacts(error="".join(last) or f"it exited with {process.returncode}")

    def best_of(self, one: LoadingFacts, two: LoadingFacts) -> LoadingFacts:
        """The faster one."""
        return max((one, two), key=lambda each: each.samples_per_s)

    def findings(self, found: Mapping[str, LoadingFacts], request: Request) -> Iterator[Finding]:
        """Rates beside those of other hosts."""
        if not request.script:
            return
        for host, facts in found.items():
            if facts.error:
                yield Finding(
                    check="data_loading",
                    severity="error",
                    hosts=[host],
                    seen=f"{request.script[0]} loads no data on {host}: {facts.error}",
                    rule="The script iterates over a DataLoader within "
                    f"{_START_S:g} s of its start.",
                    cure="Run the script on that host alone, and check that its data are there.",
                )
            else:
                yield Finding(
                    check="data_loading",
                    severity="note",
                    hosts=[host],
                    seen=f"{host} loads {facts.samples_per_s:.4g} samples/s "
                    f"({facts.batches_per_s:.3g} batches/s, {facts.num_workers} workers, the first "
                    f"batch after {facts.first_batch_s:.2g} s)",
                    rule="A rank cannot train faster than its data are loaded.",
                    cure="If a step takes less time than a batch, raise num_workers of the "
                    "DataLoader, or store the data in a form that is faster to read.",
                    value=facts.samples_per_s,
                    unit="samples/s",
                )
        rates = {host: each.samples_per_s for host, each in found.items() if not each.error}
        for host, median in slower_than_others(rates, _RATIO).items():
            yield Finding(
                check="data_loading",
                severity="warning",
                hosts=[host],
                seen=f"{host} loads {rates[host]:.4g} samples/s, the other hosts {median:.4g}",
                rule=f"Hosts load data equally fast: at least {_RATIO:.0%}. All ranks wait for the "
                "slowest.",
                cure="Compare its disks, its page cache and its link to the file server with those "
                "of the other hosts.",
                value=rates[host],
                unit="samples/s",
            )
