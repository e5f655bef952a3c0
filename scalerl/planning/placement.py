"""Which host holds what: roles on whole hosts, generators first, one line per host."""

import math
from dataclasses import dataclass

from scalerl.planning.devices import Device


@dataclass(frozen=True)
class Host:
    """A host and the numbers (from, to inclusive) of the generators and trainer ranks on it; None where it has none."""

    number: int
    generators: tuple[int, int] | None
    ranks: tuple[int, int] | None
    idle: int


def place(device: Device, generators: int, generator_devices: int, ranks: int) -> list[Host]:
    """Spread a role's actors over as few hosts as hold them; a host is shared by both roles only where a role leaves room on its last one.

    generator_devices: devices of one generator; more than a host has span whole hosts.
    """
    per_node = device.per_node
    if generator_devices > per_node:
        each = math.ceil(generator_devices / per_node)
        hosts = [
            Host(
                host,
                (host // each, host // each),
                None,
                per_node - min(per_node, generator_devices - host % each * per_node),
            )
            for host in range(generators * each)
        ]
    else:
        fit = per_node // generator_devices
        hosts = []
        for first in range(0, generators, fit):
            last = min(generators, first + fit) - 1
            hosts.append(Host(len(hosts), (first, last), None, per_node - (last - first + 1) * generator_devices))
    rank = 0
    if hosts and hosts[-1].idle >= ranks:
        last_host = hosts.pop()
        return [*hosts, Host(last_host.number, last_host.generators, (0, ranks - 1), last_host.idle - ranks)]
    while rank < ranks:
        count = min(per_node, ranks - rank)
        hosts.append(Host(len(hosts), None, (rank, rank + count - 1), per_node - count))
        rank += count
    return hosts


def lines(hosts: list[Host], device: Device) -> list[str]:
    """Return the placement in a few lines, hosts with the same role joined: `hosts 0-15: generators 0-63 (4 a host)`."""
    out = []
    for role, name in (("generators", "generators"), ("ranks", "trainer ranks")):
        mine = [host for host in hosts if getattr(host, role) is not None]
        if mine:
            first, last = mine[0], mine[-1]
            begin, end = getattr(first, role)[0], getattr(last, role)[1]
            where = f"host {first.number}" if first is last else f"hosts {first.number}-{last.number}"
            out.append(f"{where}: {name} {begin}-{end}")
    idle = sum(host.idle for host in hosts)
    return [
        *out,
        f"{len(hosts)} hosts of {device.per_node} {device.name}" + (f", {idle} devices without work" if idle else ""),
    ]
