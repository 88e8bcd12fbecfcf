"""Finds the address of this machine that other machines can reach.

gloo listens on the address of the machine's own name. Debian and others give that name the address 127.0.1.1 in
/etc/hosts, which means a different machine on every host. The connection to the ranks' store shows a better one.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IPV6_INTERFACES = Path("/proc/net/if_inet6")


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address."""
    return _parse(address).is_loopback


def resolved(host: str, port: int) -> list[str]:
    """The addresses of a host name, best first; empty if it has none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def address_towards(other: str) -> str | None:
    """This machine's address on the route to another address; None without a route. Nothing is sent."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """The network interface with this address; None if no interface of this machine has it."""
    wanted = _parse(address)
    return next((name for _, name in socket.if_nameindex() if wanted in _addresses(name)), None)


def _addresses(interface: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        found.append(ipaddress.IPv4Address(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in _IPV6_INTERFACES.read_text().splitlines():
            digits, *_, name = line.split()
            if name == interface:
                found.append(ipaddress.IPv6Address(int(digits, 16)))
    return found


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    parsed = ipaddress.ip_address(address.split("%")[0])
    return getattr(parsed, "ipv4_mapped", None) or parsed
