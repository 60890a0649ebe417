"""Examine all hosts: start a program on each, run the checks, and measure links in rounds.

A link whose measurement leads to a finding is measured again, up to twice, and the best measurement
counts: a fault persists, a disturbance does not.
"""

import logging
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from torchmn.base.errors import LaunchError
from torchmn.base.log import Log
from torchmn.cluster.units import counted
from torchmn.control.codec import Record
from torchmn.control.processes import allow_connections
from torchmn.doctor.findings import (
    SEVERITIES,
    Begin,
    Examine,
    Finding,
    LinkMeasured,
    MeasureLink,
    Request,
)
from torchmn.doctor.host_main import CHECKS, Check
from torchmn.doctor.host_session import HostSession
from torchmn.doctor.links import (
    Link,
    Pair,
    apart,
    better_link,
    link_findings,
    links_between,
    rounds_of,
    suspicious,
)
from torchmn.doctor.network import clock_findings
from torchmn.run.starters.remote import remote_shell

_log = Log(__name__)
_START_S = 20.0
_CHECK_S = 60.0
_QUICK_LINK_S, _FULL_LINK_S = 0.25, 1.0
_QUICK_ROUNDS = 8
_NUM_REPEATS = 2
_PAUSE_S = 0.7
_LINK_MARGIN_S = 15.0
_MAX_STARTING = 64
_FILES_PER_HOST = 4


class Examination(Record, frozen=True, kw_only=True):
    """The result: ``facts`` by check and host; ``clock_offsets_s`` of hosts to this one's clock."""

    hosts: list[str]
    findings: list[Finding]
    facts: dict[str, dict[str, Any]]
    links: list[Link]
    clock_offsets_s: dict[str, float]
    seconds: float


def examine(
    request: Request, env: Mapping[str, str], *, shows_progress: bool = False
) -> Examination:
    """Examine the hosts of a request from this one. Leaves nothing behind on the hosts.

    Raises LaunchError: this process may not open enough files for this number of hosts.
    """
    hosts = counted(len(request.hosts), "host", ",")
    allow_connections(_FILES_PER_HOST * len(request.hosts), f"torchmn doctor with {hosts}")
    started = time.monotonic()
    with ThreadPoolExecutor(len(request.hosts)) as workers:
        examiner = _Examiner(request, env, workers, shows_progress)
        try:
            examiner.examine()
        except BaseException:
            workers.shutdown(wait=False, cancel_futures=True)
            examiner.kill()  # or calls that are under way would be waited for
            raise
        examiner.close()
    return Examination(
        hosts=request.hosts,
        findings=sorted(examiner.findings, key=lambda each: SEVERITIES.index(each.severity)),
        facts=examiner.facts,
        links=list(examiner.links.values()),
        clock_offsets_s=examiner.clocks,
        seconds=time.monotonic() - started,
    )


class _Examiner:
    """The steps of `examine`, and what they have found so far."""

    def __init__(
        self,
        request: Request,
        env: Mapping[str, str],
        workers: ThreadPoolExecutor,
        shows_progress: bool,
    ) -> None:
        self._request = request
        self._env = env
        self._workers = workers
        self._shows_progress = shows_progress
        self._secret = secrets.token_hex(32)
        self._sessions: dict[str, HostSession] = {}
        self._starting = threading.Semaphore(_MAX_STARTING)
        self.findings: list[Finding] = []
        self.facts: dict[str, dict[str, Any]] = {}
        self.links: dict[tuple[str, str, str], Link] = {}
        self.clocks: dict[str, float] = {}

    def examine(self) -> None:
        """Take all steps. A host that does not answer in one of them is left out of the next."""
        self._start()
        self._compare_clocks()
        for name, check in CHECKS.items():
            self._check(name, check)
        self._measure_links()

    def close(self) -> None:
        """End the programs on all hosts."""
        list(self._workers.map(HostSession.close, self._sessions.values()))

    def kill(self) -> None:
        """Kill the remote shells."""
        for session in self._sessions.values():
            session.kill()

    def _start(self) -> None:
        self._say(f"starting on {counted(len(self._request.hosts), 'host')}")
        hosts = self._request.hosts
        for host, found in zip(hosts, self._workers.map(self._open, hosts), strict=True):
            if isinstance(found, HostSession):
                self._sessions[host] = found
            else:
                self._lost(host, f"{host} does not answer: {found.rstrip('.')}")

    def _say(self, text: str) -> None:
        _log.log(logging.INFO if self._shows_progress else logging.DEBUG, "%s ...", text)

    def _open(self, host: str) -> HostSession | str:
        begin = Begin(host=host, secret=self._secret, request=self._request)
        with self._starting:
            try:
                return HostSession(begin, self._env, _START_S)
            except LaunchError as error:
                return str(error)

    def _lost(self, host: str, seen: str) -> None:
        command = shlex.join((*remote_shell(self._env), host, "true"))
        self.findings.append(
            Finding(
                check="hosts",
                severity="error",
                hosts=[host],
                seen=seen,
                rule="Every host runs a command through the remote shell, with the same Python and "
                "torchmn.",
                cure=f"Check whether `{command}` works from here, and whether {sys.executable} and "
                "torchmn are there.",
            )
        )

    def _compare_clocks(self) -> None:
        offsets = self._on_all(list(self._sessions), HostSession.clock_offset_s)
        self.clocks = {host: offset for host, (offset, _) in offsets.items()}
        self._note("clocks", clock_findings(offsets))

    def _check(self, name: str, check: Check) -> None:
        self._say(f"checking {name}")
        found = self.facts[name] = self._on_all(
            list(self._sessions),
            lambda session: session.call(Examine(check=name), check.facts, _CHECK_S),
        )
        self._note(name, check.findings(found, self._request))

    def _note(self, check: str, findings: Iterable[Finding]) -> None:
        self.findings += [msgspec.structs.replace(each, check=check) for each in findings]

    @property
    def _machines(self) -> dict[str, str]:
        return {host: session.machine for host, session in self._sessions.items()}

    def _on_all(self, hosts: Sequence[str], call: Callable[[HostSession], Any]) -> dict[str, Any]:
        """Make a call for each host in parallel; return results by host, findings for errors."""

        def result(host: str) -> Any:
            try:
                return call(self._sessions[host])
            except LaunchError as error:
                return error

        # Workers only return values: this thread alone changes sessions and findings.
        found: dict[str, Any] = {}
        for host, value in zip(hosts, self._workers.map(result, hosts), strict=True):
            if isinstance(value, LaunchError):
                if self._sessions[host].is_closed:
                    self._lost(host, f"{host} no longer answers: {value}")
                    del self._sessions[host]
                else:
                    self.findings.append(_failed(host, str(value)))
            else:
                found[host] = value
        return found

    def _measure_links(self) -> None:
        facts = self.facts.get("network", {})
        hosts = [host for host in self._sessions if host in facts]
        if len(hosts) > 1:
            most = None if self._request.is_full else _QUICK_ROUNDS
            rounds = rounds_of(hosts, self._machines, most)
            self._say(f"measuring {sum(map(len, rounds))} pairs of hosts in {len(rounds)} rounds")
            for pairs in rounds:  # one direction after the other
                self._measure_pairs(pairs)
                self._measure_pairs([(two, one) for one, two in pairs])
            for number in range(_NUM_REPEATS):
                again = {
                    link.key[:2]
                    for link in suspicious(list(self.links.values()))
                    if number == 0 or not link.measured.error
                }
                again = {pair for pair in again if set(pair) <= self._sessions.keys()}
                if not again:
                    break
                self._say(f"measuring {len(again)} links again")
                time.sleep(_PAUSE_S)
                for pairs in apart(sorted(again), self._machines):
                    self._measure_pairs(pairs)
        self._note("links", link_findings(list(self.links.values()), facts))

    def _measure_pairs(self, pairs: Sequence[Pair]) -> None:
        """Measure pairs that share no machine in parallel, from the first to the second host."""
        facts, target_of = self.facts["network"], dict(pairs)
        seconds = _FULL_LINK_S if self._request.is_full else _QUICK_LINK_S

        def measured(session: HostSession) -> list[Link]:
            target = target_of[session.host]
            return [
                msgspec.structs.replace(
                    link,
                    measured=session.call(
                        MeasureLink(
                            address=link.address, port=self._sessions[target].port, seconds=seconds
                        ),
                        LinkMeasured,
                        seconds + _LINK_MARGIN_S,
                    ),
                )
                for link in links_between(session.host, target, facts, self._request)
            ]

        here = [host for host, target in pairs if {host, target} <= self._sessions.keys()]
        for links in self._on_all(here, measured).values():
            for link in links:
                known = self.links.get(link.key)
                self.links[link.key] = better_link(known, link) if known else link


def _failed(host: str, text: str) -> Finding:
    return Finding(
        check="hosts",
        severity="warning",
        hosts=[host],
        seen=f"a check failed on {host}: {text}",
        rule="Every check can be made on every host.",
        cure="What it would have found is unknown. Please report this with the text above.",
    )
