"""Check links between hosts: each pair, in both directions, over each common network."""

import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import msgspec

from torchmn.cluster.units import grouped
from torchmn.control.codec import Record
from torchmn.doctor.findings import Finding, LinkMeasured, Request, listed
from torchmn.doctor.network import NetworkFacts

_MIN_RATIO, _ERROR_RATIO = 0.5, 0.1
_MAX_LATENCY_RATIO, _MIN_LATENCY_S = 5.0, 1e-3
_MAX_RETRANSMITTED, _MAX_LOSS_RATIO = 0.02, 4.0
_FASTER = 2.0


class Link(Record, frozen=True, kw_only=True):
    """One direction between two hosts in one network; the nominal speed is 0 if unknown.

    ``is_named``: the target's host name resolves to this address.
    """

    source: str
    target: str
    network: str
    interface: str
    address: str
    is_named: bool
    nominal_bytes_per_s: float
    measured: LinkMeasured = LinkMeasured()

    @property
    def key(self) -> tuple[str, str, str]:
        """Identity of the link: source, target and network."""
        return self.source, self.target, self.network


def links_between(
    source: str, target: str, facts: Mapping[str, NetworkFacts], request: Request
) -> Iterator[Link]:
    """Yield the links from one host to another, to be measured, one for each network.

    Interfaces that are down are left out, unless host names resolve to them.
    """
    theirs = {each.network: each for each in reversed(facts[target].interfaces)}
    resolved = facts[source].resolved.get(target, [])
    done = set()
    for own in facts[source].interfaces:
        other = theirs.get(own.network)
        if other is None or other.address == own.address or own.network in done:
            continue
        is_named = other.address in resolved[:1]
        if is_named or (own.is_up and other.is_up):
            done.add(own.network)
            nominal = [speed for speed in (own.bytes_per_s, other.bytes_per_s) if speed]
            yield Link(
                source=source,
                target=target,
                network=own.network,
                interface=own.name,
                address=other.address,
                is_named=is_named,
                nominal_bytes_per_s=request.expected_bytes_per_s or min(nominal, default=0.0),
            )
    if resolved and not done:
        # hosts of different networks, with a router between them
        route = facts[source].routes.get(target, "")
        yield Link(
            source=source,
            target=target,
            network="routed",
            interface=route,
            address=resolved[0],
            is_named=True,
            nominal_bytes_per_s=request.expected_bytes_per_s,
        )


def better_link(one: Link, two: Link) -> Link:
    """Combine the best values of two measurements: a disturbance of one is not a fault."""
    if one.measured.error or two.measured.error:
        return one if two.measured.error else two
    measured = LinkMeasured(
        bytes_per_s=max(one.measured.bytes_per_s, two.measured.bytes_per_s),
        latency_s=min(one.measured.latency_s, two.measured.latency_s),
        retransmitted=min(one.measured.retransmitted, two.measured.retransmitted),
    )
    return msgspec.structs.replace(one, measured=measured)


def suspicious(links: Sequence[Link]) -> list[Link]:
    """Return the links that break a rule, to be measured again."""
    found: dict[tuple[str, str, str], Link] = {}
    for each in grouped((link.network, link) for link in links).values():
        for chosen, _ in _problems(each):
            found |= {link.key: link for link in chosen}
    return list(found.values())


def link_findings(links: Sequence[Link], facts: Mapping[str, NetworkFacts]) -> Iterator[Finding]:
    """Yield the problems of links, attributed to a host if all its links have the problem."""
    for each in grouped((link.network, link) for link in links).values():
        for bad, describe in _problems(each):
            for hosts, where, chosen in _places(bad, each):
                yield describe(hosts, where, chosen)
    yield from _wrong_interface(links, facts)


Describe = Callable[[list[str], str, list[Link]], Finding]


def _problems(links: Sequence[Link]) -> Iterator[tuple[list[Link], Describe]]:
    """Yield for each rule the links of one network that break it, and how to describe them."""
    errors = [link for link in links if link.measured.error]
    if errors:
        yield errors, _no_connection
    good = [link.measured for link in links if not link.measured.error]
    if not good:
        return
    rate = -_best_quarter([-each.bytes_per_s for each in good])
    latency_s = _best_quarter([each.latency_s for each in good])
    lost = _best_quarter([each.retransmitted for each in good])
    slow, late, lossy = [], [], []
    for link in links:
        measured = link.measured
        if measured.error:
            continue
        if measured.bytes_per_s < _MIN_RATIO * max(rate, link.nominal_bytes_per_s):
            slow.append(link)
        elif measured.retransmitted > max(_MAX_RETRANSMITTED, _MAX_LOSS_RATIO * lost):
            lossy.append(link)
        if measured.latency_s > max(_MAX_LATENCY_RATIO * latency_s, latency_s + _MIN_LATENCY_S):
            late.append(link)
    if slow:
        yield slow, lambda hosts, where, chosen: _slow(hosts, where, chosen, rate)
    if late:
        yield late, lambda hosts, where, chosen: _long_way(hosts, where, chosen, latency_s)
    if lossy and not slow:  # else the loss is what makes them slow, or follows from it
        yield lossy, _losing


def _best_quarter(values: Sequence[float]) -> float:
    """Return the value at the end of the lowest quarter.

    The median would not do: of three hosts, a single bad one takes part in four of six links.
    """
    return sorted(values)[len(values) // 4]


# Of a host that is the cause: what it does, its end of a link, and the least number of its links.
_SIDES: tuple[tuple[str, Callable[[Link], tuple[str, ...]], int], ...] = (
    ("sends to and receives from", lambda link: (link.source, link.target), 3),
    ("sends to", lambda link: (link.source,), 2),
    ("receives from", lambda link: (link.target,), 2),
)


def _places(
    bad: Sequence[Link], links: Sequence[Link]
) -> Iterator[tuple[list[str], str, list[Link]]]:
    """Locate the cause: all links, a host (sending, receiving or both), or single links."""
    if len(bad) == len(links) > 1:
        hosts = sorted({link.source for link in bad})
        yield hosts, f"between all hosts ({listed(hosts)})", list(bad)
        return
    left = {link.key: link for link in bad}
    for verb, ends_of, least in _SIDES:
        of_host = Counter(host for link in links for host in ends_of(link))
        bad_of = Counter(host for link in left.values() for host in ends_of(link))
        for host, number in bad_of.items():
            chosen = [link for link in left.values() if host in ends_of(link)]
            if chosen and number == of_host[host] >= least:
                peers = sorted({name for link in chosen for name in link.key[:2]} - {host})
                yield [host], f"where {host} {verb} {listed(peers)}", chosen
                for link in chosen:
                    left.pop(link.key)
    for link in left.values():
        yield [link.source, link.target], f"where {link.source} sends to {link.target}", [link]


def _no_connection(hosts: list[str], where: str, links: list[Link]) -> Finding:
    reason = Counter(link.measured.error for link in links).most_common(1)[0][0]
    return Finding(
        "error" if any(link.is_named for link in links) else "warning",
        hosts,
        f"no connection {where}, over {links[0].interface} (such as {links[0].address}): {reason}",
        "Every host can connect to every other one, on any port above 1024.",
        "Check that the interface has a carrier (ip link) and is meant for jobs, and open the "
        "ports in the firewall (iptables -L, nft list ruleset, the security group of a cloud). If "
        "short messages pass and long ones do not, compare the MTU of hosts and switch.",
    )


def _slow(hosts: list[str], where: str, links: list[Link], usual: float) -> Finding:
    rate = statistics.median(link.measured.bytes_per_s for link in links)
    nominal = links[0].nominal_bytes_per_s
    bound = max(nominal, usual)
    beside = f" of {_gbit(nominal)}" if nominal else ""
    others = f", other links {_gbit(usual)}" if rate < _MIN_RATIO * usual else ""
    lost = statistics.median(link.measured.retransmitted for link in links)
    if lost > _MAX_RETRANSMITTED:
        others += f"; {lost:.1%} of the packets are sent again"
    return Finding(
        "error" if rate < _ERROR_RATIO * bound else "warning",
        hosts,
        f"{links[0].interface} carries {_gbit(rate)}{beside} Gb/s {where}{others}",
        f"A link carries at least {_MIN_RATIO:.0%} of its adapter's speed and of the fastest "
        "quarter of links.",
        "Check cable and switch port (ethtool INTERFACE: speed, duplex; ethtool -S: errors), "
        "limits of the cloud or of tc, and what else uses the link.",
    )


def _long_way(hosts: list[str], where: str, links: list[Link], usual_s: float) -> Finding:
    latency_s = statistics.median(link.measured.latency_s for link in links)
    return Finding(
        "warning",
        hosts,
        f"a round trip takes {latency_s * 1e3:.3g} ms {where}, over {links[0].interface}; on "
        f"other links {usual_s * 1e3:.3g} ms",
        f"Round trips take at most {_MAX_LATENCY_RATIO:g} times those of other links.",
        "Look for a route by another site (traceroute), a busy host or a congested switch.",
    )


def _losing(hosts: list[str], where: str, links: list[Link]) -> Finding:
    lost = statistics.median(link.measured.retransmitted for link in links)
    return Finding(
        "warning",
        hosts,
        f"{lost:.1%} of the packets are sent again {where}, over {links[0].interface}",
        f"At most {_MAX_RETRANSMITTED:.0%} of the packets are lost.",
        "Check cable, switch port and duplex (ethtool -S INTERFACE), and limits that drop packets.",
    )


def _wrong_interface(links: Sequence[Link], facts: Mapping[str, NetworkFacts]) -> Iterator[Finding]:
    """Find host names that resolve to a slower network than another one of the hosts."""
    networks = grouped((link.network, link) for link in links if not link.measured.error)
    if len(networks) < 2:
        return
    rates = {
        network: statistics.median(link.measured.bytes_per_s for link in each)
        for network, each in networks.items()
    }
    best = max(rates, key=lambda network: rates[network])
    for network, each in networks.items():
        fast, slow = networks[best][0].interface, each[0].interface
        used = sorted({link.source for link in each if link.is_named})
        if not used or rates[best] < _FASTER * rates[network]:
            continue
        yield Finding(
            "warning",
            used,
            f"the names of the hosts lead to {slow}, which carries {_gbit(rates[network])} Gb/s, "
            f"and {fast} is idle with {_gbit(rates[best])} Gb/s (gloo would take "
            f"{facts[used[0]].taken['gloo']}, NCCL {facts[used[0]].taken['NCCL']})",
            "Host names lead to the fastest network that all hosts have.",
            f"Name the hosts by their addresses in {best}; or under other launchers than torchmn "
            f"set GLOO_SOCKET_IFNAME={fast} NCCL_SOCKET_IFNAME={fast} and "
            f"OMPI_MCA_btl_tcp_if_include={best}.",
        )


def _gbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-9:.3g}"


Pair = tuple[str, str]


def rounds_of(
    hosts: Sequence[str], machines: Mapping[str, Hashable], max_rounds: int | None = None
) -> list[list[Pair]]:
    """Divide all pairs of hosts into rounds in which no machine takes part twice.

    With ``max_rounds`` only some rounds of a round-robin tournament, in which each host meets this
    number of others. Pairs that share a machine, as containers do, are in different rounds.

    >>> rounds_of(["a", "b", "c", "d"], {name: name for name in "abcd"})
    [[('a', 'd'), ('b', 'c')], [('d', 'c'), ('a', 'b')], [('b', 'd'), ('c', 'a')]]
    """
    rounds = _round_robin(hosts)
    if max_rounds is not None and max_rounds < len(rounds):
        rounds = [rounds[number * len(rounds) // max_rounds] for number in range(max_rounds)]
    return [part for pairs in rounds for part in apart(pairs, machines)]


def apart(pairs: Iterable[Pair], machines: Mapping[str, Hashable]) -> list[list[Pair]]:
    """Divide pairs into rounds in which no machine takes part twice."""
    rounds: list[list[Pair]] = []
    busy: list[set[Hashable]] = []
    for pair in pairs:
        needed = {machines[host] for host in pair}
        number = next((n for n, others in enumerate(busy) if not needed & others), len(rounds))
        if number == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[number].append(pair)
        busy[number] |= needed
    return rounds


def _round_robin(hosts: Sequence[str]) -> list[list[Pair]]:
    """Make a round-robin tournament by the circle method: one place stays, others rotate.

    With an odd number of hosts one of them rests in each round.
    """
    circle: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    size = len(circle)
    rounds = []
    for number in range(size - 1):
        pairs = []
        for place in range(size // 2):
            one, two = circle[place], circle[size - 1 - place]
            if one is not None and two is not None:
                pairs.append((one, two) if (number + place) % 2 == 0 or place else (two, one))
        rounds.append(pairs)
        circle = [circle[-2], *circle[:-2], circle[-1]]
    return rounds
