"""The address a server listens on, and whether it can be watched there. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.addresses import open_words
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.knowledge import Knowledge
from vllm_launchers.plan.model import Changes, Plan
from vllm_launchers.secrets import API_KEY

CERTIFICATE_REQUIRED = 2
"""`ssl.CERT_REQUIRED`."""


def network_findings(plan: Plan, knowledge: Knowledge) -> Iterator[Finding]:
    """Port, key, and flags that hide a server from whoever watches it."""
    if holder := knowledge.surroundings.port_holder:
        text = f"port {plan.port} is taken {holder}; choose another, or leave --port out to get a free one"
        yield Finding("port_taken", Level.ERROR, text)
    if told := open_words(plan.host, API_KEY in plan.secrets):
        text = f"{told}. Export {API_KEY} first, or leave --host out to stay on this machine"
        yield Finding("open_to_all_without_key", Level.WARNING, text)
    yield from _watching(plan)


def _watching(plan: Plan) -> Iterator[Finding]:
    flags = plan.flags
    if flags.get("disable-log-stats") is True:
        text = "--disable-log-stats takes away every metric: this server cannot be watched"
        yield Finding("unwatchable", Level.WARNING, text, Changes(unset=("disable-log-stats",)))
    if flags.get("ssl-cert-reqs") == CERTIFICATE_REQUIRED:
        text = "--ssl-cert-reqs 2 asks every client for a certificate; this console has none and will not see it ready"
        yield Finding("unwatchable", Level.WARNING, text, Changes(unset=("ssl-cert-reqs",)))
    for name in ("headless", "grpc"):
        if flags.get(name) is True:
            text = f"--{name} leaves out the HTTP API: the server will never be seen ready"
            yield Finding("unwatchable", Level.WARNING, text, Changes(unset=(name,)))
