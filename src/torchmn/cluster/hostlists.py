"""Lists of hosts and their slots: host files, ``--hosts``, and Slurm's compressed lists.

Pure functions over text. The slots of a host that is listed several times are added up.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from torchmn.base.errors import TopologyError, UsageError
from torchmn.cluster.units import counted

_COUNT = "[0-9]{1,9}"
_MAX_NAMES = 100_000
_MAX_SHOWN = 500


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host by name or address, and its slots: the maximum number of ranks on it.

    Example:
        >>> str(Host(name="a", slots=4))
        'a:4'
    """

    name: str
    slots: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._:%-]*[A-Za-z0-9])?", self.name):
            raise UsageError(f"{self.name!r} is neither a host name nor an address.")
        if self.slots < 1:
            raise UsageError(f"Host {self.name} has {self.slots} slots: at least 1.")

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hostfile(text: str, *, source: str) -> tuple[Host, ...]:
    """Parse a host file in Open MPI's format, with a line ``name slots=4 # comment`` per host.

    A line without ``slots`` counts 1, so that a scheduler's list with a line per rank works too.
    ``max-slots`` (or ``max_slots``) is accepted and ignored: no host gets more ranks than slots.
    ``source`` names the file in messages. Raises UsageError with the line's number and text.

    >>> [str(host) for host in parse_hostfile("a slots=2  # first\\n10.0.0.2\\n", source="hosts")]
    ['a:2', '10.0.0.2:1']
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        try:
            found.append(_host_of(fields))
        except UsageError as error:
            raise UsageError(
                f"{source}, line {number}: {line.strip()!r}: {error} A line is NAME [slots=N]."
            ) from None
    if not found:
        raise UsageError(f"{source} names no host: each line is NAME [slots=N].")
    return _merged(found)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse the hosts of ``--hosts``. Raises UsageError.

    >>> [str(host) for host in parse_hosts("a:4,b")]
    ['a:4', 'b:1']
    """
    hosts = []
    for part in text.split(","):
        name, colon, count = part.strip().rpartition(":")
        if not colon:
            name, count = count, "1"
        if not name or not re.fullmatch(_COUNT, count):
            raise UsageError(f"--hosts must be a list like a:4,b:2 but contains {part!r}.")
        hosts.append(Host(name=name, slots=int(count)))
    return _merged(hosts)


def parse_node_list(text: str, *, variable: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """Return the names in Slurm's compressed list, in its order. Raises TopologyError.

    >>> parse_node_list("login,gpu[08-10,12]")
    ('login', 'gpu08', 'gpu09', 'gpu10', 'gpu12')
    """
    if not re.fullmatch(r"(?:[^,\[\]]|\[[^\[\]]*\]|,)+", text):
        raise _invalid_node_list(variable, text)
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        names += _expanded(part.strip(), variable, text)
        if len(names) > _MAX_NAMES:
            raise _invalid_node_list(variable, text)
    return tuple(names)


def parse_task_counts(text: str, *, variable: str = "SLURM_TASKS_PER_NODE") -> tuple[int, ...]:
    """Return the numbers in Slurm's compressed list of task counts. Raises TopologyError.

    >>> parse_task_counts("2(x3),1")
    (2, 2, 2, 1)
    """
    parts = [
        re.fullmatch(rf"({_COUNT})(?:\(x({_COUNT})\))?", part.strip()) for part in text.split(",")
    ]
    matches = [part for part in parts if part is not None]
    if len(matches) < len(parts) or sum(int(m[2] or 1) for m in matches) > _MAX_NAMES:
        raise TopologyError(
            f"{variable} must look like '2(x3),1' but is {text!r}. Unset it, or start the "
            "script with srun, which sets it."
        )
    return tuple(chain.from_iterable(repeat(int(m[1]), int(m[2] or 1)) for m in matches))


def select_hosts(
    hosts: Sequence[Host],
    *,
    num_ranks: int | None = None,
    num_nodes: int | None = None,
    per_node: int | None = None,
) -> tuple[Host, ...]:
    """Choose hosts and the number of ranks on each; hosts are filled one after another.

    All slots are used by default. Raises UsageError: there are fewer hosts or slots than
    asked for, or the numbers contradict each other.

    >>> [str(host) for host in select_hosts(parse_hosts("a:4,b:4"), num_ranks=5)]
    ['a:4', 'b:1']
    """
    for option, value in (("-n", num_ranks), ("--nodes", num_nodes), ("--per-node", per_node)):
        if value is not None and value < 1:
            raise UsageError(f"{option} must be at least 1, got {value}.")
    listed = ", ".join(map(str, hosts))
    if num_nodes is not None:
        if num_nodes > len(hosts):
            raise UsageError(
                f"--nodes {num_nodes} is more than the {counted(len(hosts), 'host')}: {listed}."
            )
        hosts = hosts[:num_nodes]
    if per_node is not None:
        small = [str(host) for host in hosts if host.slots < per_node]
        if small:
            raise UsageError(
                f"--per-node {per_node} is more than the slots of {', '.join(small)}: raise their "
                "slots, or use fewer ranks."
            )
        hosts = [Host(name=host.name, slots=per_node) for host in hosts]
    num_slots = sum(host.slots for host in hosts)
    if num_ranks is None:
        return tuple(hosts)
    if num_ranks > num_slots:
        raise UsageError(
            f"{num_ranks} ranks are more than the {counted(num_slots, 'slot')} of {listed}: ask "
            "for fewer, or raise the number of slots in the list of hosts."
        )
    if num_nodes is not None and per_node is not None and num_ranks != num_slots:
        raise UsageError(f"-n {num_ranks} contradicts --nodes {num_nodes} --per-node {per_node}.")
    seated, left = [], num_ranks
    for host in hosts:
        if left:
            seated.append(Host(name=host.name, slots=min(left, host.slots)))
            left -= seated[-1].slots
    return tuple(seated)


def _host_of(fields: Sequence[str]) -> Host:
    name, slots = fields[0], 1
    for word in fields[1:]:
        key, _, value = word.partition("=")
        if key.replace("_", "-") not in ("slots", "max-slots"):
            raise UsageError(f"unknown setting {word!r}.")
        if not re.fullmatch(_COUNT, value):
            raise UsageError(f"{key} should be a whole number but is {value!r}.")
        if key == "slots":
            slots = int(value)
    return Host(name=name, slots=slots)


def _merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name=name, slots=number) for name, number in slots.items())


def _expanded(part: str, variable: str, text: str) -> list[str]:
    """Return the names of one element of the list, which may have several brackets."""
    pieces = re.findall(r"[^\[\]]+|\[[^\[\]]+\]", part)
    if not part or "".join(pieces) != part:
        raise _invalid_node_list(variable, text)
    names = [""]
    for piece in pieces:
        ends = _numbers(piece[1:-1], variable, text) if piece.startswith("[") else [piece]
        if len(names) * len(ends) > _MAX_NAMES:
            raise _invalid_node_list(variable, text)
        names = [f"{name}{end}" for name in names for end in ends]
    return names


def _numbers(ranges: str, variable: str, text: str) -> list[str]:
    """Return the numbers in a bracket such as ``08-10,12``, with leading zeros."""
    numbers: list[str] = []
    for piece in ranges.split(","):
        ends = re.fullmatch(f"({_COUNT})(?:-({_COUNT}))?", piece.strip())
        if ends is None:
            raise _invalid_node_list(variable, text)
        first, last = ends[1], ends[2] or ends[1]
        if not 0 <= int(last) - int(first) < _MAX_NAMES - len(numbers):
            raise _invalid_node_list(variable, text)
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return numbers


def _invalid_node_list(variable: str, text: str) -> TopologyError:
    shown = text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
    return TopologyError(
        f"{variable} must look like 'n[01-03],m1', {_MAX_NAMES} names at most, but is "
        f"{shown!r}. Unset it, or start the job with the scheduler, which sets it."
    )
