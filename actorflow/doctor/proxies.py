"""Checks for proxy variables and preloaded libraries that would divert the nodes' connections."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from actorflow.doctor.finding import Finding
from actorflow.rendezvous.addresses import is_loopback

if TYPE_CHECKING:
    from actorflow.doctor.machine_facts import MachineFacts

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
_REDIRECTS = re.compile(r"proxychains|tsocks|torsocks|libdl_socks", re.IGNORECASE)


def preloaded(here: MachineFacts) -> Finding | None:
    """A library that sends every connection of this process to a proxy, which carries none of a run's."""
    found = _REDIRECTS.search(here.environ.get("LD_PRELOAD", ""))
    if found is None:
        return None
    return Finding(
        "library in the way",
        f"LD_PRELOAD={here.environ['LD_PRELOAD']} sends this process's connections through a proxy.",
        "Ranks connect to each other directly.",
        "Start the run without it.",
    )


def proxied(here: MachineFacts) -> Finding | None:
    """A proxy variable, for a node that no_proxy does not name."""
    name, value = next(
        ((n, here.environ[n]) for v in VARIABLES for n in (v, v.upper()) if here.environ.get(n)), ("", "")
    )
    exempt = here.environ.get("no_proxy") or here.environ.get("NO_PROXY") or ""
    addresses = {node: here.resolve(node) for node in here.nodes}
    proxied = [node for node, found in addresses.items() if not (_local(found) or _exempt(node, found, exempt))]
    if not name or not proxied:
        return None
    others = ", ".join(proxied)
    return Finding(
        "proxy variable",
        f"{name}={_without_password(value)} is set, and no_proxy does not name {others}.",
        "Ranks connect to each other directly and not through it, which fails where this network lets machines talk "
        "through the proxy alone; other programs and libraries of the script would go through it.",
        f"If the nodes can reach each other directly, add them to no_proxy (export no_proxy={others.replace(' ', '')}) "
        f"or unset {name}; if not, have the ports opened between them.",
        certain=False,
    )


def _local(addresses: tuple[str, ...]) -> bool:
    return bool(addresses) and all(map(is_loopback, addresses))


def _exempt(host: str, addresses: tuple[str, ...], rules: str) -> bool:
    """Whether no_proxy's rules name a host: by name, by the end of its name, by address or by network."""
    for rule in filter(None, (r.strip().lower() for r in rules.split(","))):
        if rule == "*" or host.lower() == rule or host.lower().endswith("." + rule.lstrip(".")):
            return True
        try:
            network = ipaddress.ip_network(rule, strict=False)
            if any(ipaddress.ip_address(a.partition("%")[0]) in network for a in addresses):
                return True
        except ValueError:
            continue
    return False


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//…@", url)
