"""The options of torchrun, and what each of them means for `torchmn run`.

Every option of torchrun is accepted: it becomes an option of torchmn, has no effect because torchmn
does the same by itself, or is refused with what to use instead. As for torchrun, the variable
``PET_<NAME>`` replaces an option that is not given.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torchmn.base.errors import UnsupportedError, UsageError
from torchmn.cluster.cpus import available_processors
from torchmn.cluster.gpus import count_gpus

_DEFAULT_PORTS = {"c10d": 29400, "static": 29500}  # torchrun's


def _option(*flags: str) -> Any:
    """Declare an option of torchrun, which the help does not list."""
    name = flags[-1].removeprefix("--")
    metadata = {
        "help": f"torchrun's --{name}.",
        "flags": flags,
        "variable": f"PET_{name.replace('-', '_').upper()}",
        "is_hidden": True,
    }
    return field(default=None, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TorchrunOptions:
    """The options of torchrun that `RunOptions` does not have; ``None`` for those not given."""

    nnodes: str | None = _option("--nnodes")
    node_rank: int | None = _option("--node-rank")
    master_addr: str | None = _option("--master-addr")
    master_port: int | None = _option("--master-port")
    standalone: bool | None = _option("--standalone")
    rdzv_backend: str | None = _option("--rdzv-backend")
    rdzv_endpoint: str | None = _option("--rdzv-endpoint")
    rdzv_id: str | None = _option("--rdzv-id")
    rdzv_conf: str | None = _option("--rdzv-conf")
    no_python: bool | None = _option("--no-python")
    redirects: str | None = _option("-r", "--redirects")
    tee: str | None = _option("-t", "--tee")
    local_ranks_filter: str | None = _option("--local-ranks-filter")
    run_path: bool | None = _option("--run-path")
    role: str | None = _option("--role")
    monitor_interval: float | None = _option("--monitor-interval")
    start_method: str | None = _option("--start-method")
    event_log_handler: str | None = _option("--event-log-handler")
    local_addr: str | None = _option("--local-addr")
    numa_binding: str | None = _option("--numa-binding")
    signals_to_handle: str | None = _option("--signals-to-handle")
    logs_specs: str | None = _option("--logs-specs")
    virtual_local_rank: bool | None = _option("--virtual-local-rank")
    log_line_prefix_template: str | None = _option("--log-line-prefix-template")
    duplicate_stdout_filters: str | None = _option("--duplicate-stdout-filters")
    duplicate_stderr_filters: str | None = _option("--duplicate-stderr-filters")


_WITHOUT_EFFECT = {
    "redirects": "all output is in files and shown, that of --local-ranks-filter if it is given",
    "role": "all ranks have the same role",
    "monitor_interval": "the end of a rank is noticed at once",
    "start_method": "every rank is a new process",
    "event_log_handler": "the record of a run has its events, see `torchmn report`",
    "local_addr": "a host uses its address towards the others, or that of GLOO_SOCKET_IFNAME",
    "numa_binding": "each rank is bound to the cores next to its GPU",
    "log_line_prefix_template": "lines begin with their rank in brackets",
    "signals_to_handle": "SIGTERM, SIGUSR1 and SIGUSR2 are passed on to the scripts",
}
_IN_FILES = "the output of every rank is in its own file in --log-dir: search it there"
_REFUSED = {
    "logs_specs": "the output of every rank is shown and kept in --log-dir",
    "virtual_local_rank": "LOCAL_RANK counts the ranks of a host: use comm.device",
    "duplicate_stdout_filters": _IN_FILES,
    "duplicate_stderr_filters": _IN_FILES,
}


def translate(
    options: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the options of `RunOptions` for options of both, and notes on those without effect.

    Raises UsageError: a value has another form, or options contradict each other. Raises
    UnsupportedError: an option has no equivalent.

    >>> translate({"nnodes": "2", "node_rank": 1, "master_addr": "10.0.0.1"}, {})[0]["elastic"]
    '2:2'
    """
    own = {each.name for each in fields(TorchrunOptions)}
    given = TorchrunOptions(**{k: v for k, v in options.items() if k in own})
    chosen = {k: v for k, v in options.items() if k not in own}
    for name, cure in _REFUSED.items():
        if getattr(given, name):
            raise UnsupportedError(f"{_flag(name)} has no equivalent: {cure}.")
    notes = tuple(
        f"{_flag(name)} has no effect: {why}."
        for name, why in _WITHOUT_EFFECT.items()
        if getattr(given, name) is not None
    )
    chosen |= dict(_counts(chosen, env))
    if given.local_ranks_filter:
        chosen["shown"] = _local_ranks(given.local_ranks_filter)
    return {**chosen, **_hosts(given, chosen)}, notes


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _counts(chosen: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[tuple[str, int | None]]:
    """Yield ``num_ranks`` and ``per_node`` as numbers."""
    for name, flag in (("num_ranks", "-n"), ("per_node", "--per-node")):
        text = chosen.get(name)
        if text is None:
            continue
        if re.fullmatch(r"\s*[+-]?\d+\s*", text):
            yield name, int(text)
            continue
        number = _num_devices(text, flag, env)
        if chosen.get("hosts") is not None or chosen.get("hostfile") is not None:
            raise UsageError(
                f"{flag} {text} counts the devices of this host, not those of the hosts that "
                "--hosts or --hostfile names: write their numbers, as in --hosts a:8,b:8."
            )
        # of all hosts: those of a scheduler's job are taken to be alike
        yield name, None
        yield "per_node", number


def _num_devices(word: str, flag: str, env: Mapping[str, str]) -> int:
    """Return the number of ranks for ``gpu``, ``cpu`` or ``auto``. Raises UsageError."""
    num_gpus = count_gpus(env)
    if word == "cpu" or (word == "auto" and not num_gpus):
        return len(available_processors().logical)
    if word not in ("gpu", "auto"):
        hint = " The option is -n, not -np." if (flag, word) == ("-n", "p") else ""
        raise UsageError(f"{flag} must be a whole number, gpu, cpu or auto, got {word!r}.{hint}")
    if not num_gpus:
        visible = env.get("CUDA_VISIBLE_DEVICES")
        why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        raise UsageError(f"{flag} gpu: this host has no CUDA GPU{why}. Use a number, or cpu.")
    return num_gpus


# ---- hosts ---------------------------------------------------------------------------------------


def _hosts(given: TorchrunOptions, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `RunOptions` for those that tell how hosts meet."""
    low, high = _range(given.nnodes)
    if given.standalone:
        if high not in (None, 1):
            raise UsageError(
                f"--standalone means one host and contradicts --nnodes {given.nnodes}."
            )
        return {"num_nodes": 1}
    if high is not None and chosen.get("elastic") is not None:
        raise UsageError("--nnodes MIN:MAX and --elastic MIN:MAX are the same: use one of them.")
    if high is not None and chosen.get("num_nodes") not in (None, high):
        raise UsageError(f"--nnodes {given.nnodes} contradicts --nodes {chosen['num_nodes']}.")
    address, port = _address(given)
    found = re.search(r"\b(?:join_)?timeout=(\d+)", given.rdzv_conf or "")
    seconds, node_rank = f":{found[1]}" if found else "", given.node_rank
    if node_rank is not None and not 0 <= node_rank < (high or sys.maxsize):
        raise UsageError(f"--node-rank must be from 0 to {(high or 1) - 1}, got {node_rank}.")
    if high is None and chosen.get("elastic") is None:
        if node_rank or (address is not None and given.nnodes is None):
            raise UsageError(
                "--master-addr, --rdzv-endpoint and --node-rank are for hosts that are started one "
                "by one: say how many there are with --nnodes N, or MIN:MAX."
            )
        return {}
    if low == high == 1:
        return {"num_nodes": 1}
    if address is None and node_rank is not None:
        raise UsageError(
            "--node-rank is for hosts that are started one by one, which meet at the first one: "
            "give all of them its address with --master-addr."
        )
    if address is None:  # torchmn starts them: those of a list, or of a scheduler's job
        if low == high:
            return {"num_nodes": high} if high else {}
        return {"elastic": f"{low}:{high}{seconds}"}
    for name in ("hosts", "hostfile", "num_nodes"):
        if chosen.get(name) is not None:
            raise UsageError(
                "--master-addr and --rdzv-endpoint are for hosts that are started one by one, and "
                "--hosts, --hostfile and --nodes for hosts that torchmn starts: use one of them."
            )
    if not 0 < port < 1 << 16:
        raise UsageError(f"--master-port must be from 1 to 65535, got {port}.")
    place: dict[str, Any] = {"meeting": (address, port), "node_rank": node_rank}
    if high is not None:
        place["elastic"] = f"{low}:{high}{seconds}"
        if low == high:
            place |= {"has_fixed_hosts": True, "max_restarts": chosen.get("max_restarts") or 0}
    return place


def _range(nnodes: str | None) -> tuple[int | None, int | None]:
    """Return the minimum and maximum number of hosts."""
    if nnodes is None:
        return None, None
    found = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise UsageError(f"--nnodes must be N, or MIN:MAX with 1 <= MIN <= MAX, got {nnodes!r}.")
    return low, high


def _address(given: TorchrunOptions) -> tuple[str | None, int]:
    """Return the address and the port of the host at which all meet."""
    backend = given.rdzv_backend or "static"
    if backend not in _DEFAULT_PORTS:
        raise UnsupportedError(
            f"--rdzv-backend {backend} is not supported: hosts meet at the first host, whose "
            "address is --master-addr or --rdzv-endpoint. Leave --rdzv-backend out."
        )
    default = given.master_port or _DEFAULT_PORTS[backend]
    if not given.rdzv_endpoint:
        return given.master_addr, default
    found = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d+))?", given.rdzv_endpoint)
    if found is None:
        raise UsageError(f"--rdzv-endpoint must be HOST:PORT, got {given.rdzv_endpoint!r}.")
    return found[1].strip("[]"), int(found[2] or default)


def _local_ranks(text: str) -> frozenset[int]:
    """Return the local ranks whose output is shown."""
    ranks = text.split(",")
    if not all(each.strip().isdecimal() for each in ranks):
        raise UsageError(
            f"--local-ranks-filter must be a list of local ranks, such as 0,1, got {text!r}."
        )
    return frozenset(map(int, ranks))
