"""Queries a Prometheus server for its scrape targets and alerting rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from vllm_console.alerts.checklist import Monitoring
from vllm_console.text import plain
from vllm_launchers.addresses import server_url
from vllm_launchers.errors import UsageError
from vllm_launchers.secrets import redact

SECONDS = 5.0
LARGEST = 16 << 20
MOST_ENTRIES = 10_000


def ask_prometheus(url: str) -> Monitoring:
    """Query the Prometheus at ``url``; a problem is one sentence. Blocks for some seconds at most."""
    import httpx

    url, shown = url.rstrip("/"), redact(plain(url.rstrip("/"), 200))
    try:
        with httpx.Client(trust_env=False, timeout=SECONDS) as client:
            targets = _data(client, f"{url}/api/v1/targets?state=active")
            rules = _data(client, f"{url}/api/v1/rules?type=alert")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        refused = isinstance(error, httpx.ConnectError) and "refused" in str(error)
        why = "nothing answers" if refused else redact(plain(str(error), 200))
        return Monitoring(shown, problem=f"no Prometheus at {shown}: {why}")
    except ValueError:
        return Monitoring(shown, problem=f"no Prometheus at {shown}: the response is not from Prometheus")
    return Monitoring(shown, tuple(_targets(targets)), tuple(_alerts(rules)))


def _data(client: Any, url: str) -> dict[str, Any]:
    body = b""
    with client.stream("GET", url) as response:
        for piece in response.iter_bytes():
            body += piece
            if len(body) > LARGEST:
                raise ValueError("too long")
    try:
        document = json.loads(body)
    except RecursionError as error:
        raise ValueError("too deep") from error
    data = document.get("data") if isinstance(document, dict) and document.get("status") == "success" else None
    if not isinstance(data, dict):
        raise ValueError("no data")
    return data


def _targets(data: dict[str, Any]) -> Iterator[str]:
    """Host and port of each target."""
    for one in _list(data.get("activeTargets")):
        try:
            server = server_url(str(one.get("scrapeUrl")).partition("?")[0])
        except UsageError:
            continue
        yield f"{server.host}:{server.port}"


def _alerts(data: dict[str, Any]) -> Iterator[str]:
    for group in _list(data.get("groups")):
        for rule in _list(group.get("rules")):
            if rule.get("type") == "alerting":
                yield str(rule.get("name"))


def _list(value: object) -> list[dict[str, Any]]:
    return [one for one in value[:MOST_ENTRIES] if isinstance(one, dict)] if isinstance(value, list) else []
