"""A model's facts from the Hugging Face hub. Queried only on request: nothing else here uses the network."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from msgspec.structs import replace

from vllm_launchers.vllm.model_folder import HUB_ID, config_from_params
from vllm_launchers.vllm.modelfacts.config import facts_from_config
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, ModelFactsError
from vllm_launchers.vllm.modelfacts.read import from_name, with_parameters
from vllm_launchers.vllm.modelfacts.values import MOST_BYTES, NO, Config, mapping, number, objects, parse_json, text
from vllm_launchers.vllm.modelfacts.weights import weight_files

if TYPE_CHECKING:
    import httpx

ENDPOINT = "https://huggingface.co"
TIMEOUT_SECONDS = 10.0
"""Time limit for a complete response."""
_REFUSED = (401, 403)
_QUANT_CONFIG = "hf_quant_config.json"


def facts_from_hub(
    model: str,
    token: str | None = None,
    *,
    revision: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> ModelFacts:
    """Query the hub for a model's config and file sizes: a few kilobytes in up to four requests.

    Each may take `TIMEOUT_SECONDS`. The hub is ``HF_ENDPOINT`` if set, else the public one. ``gated`` is True if
    access was not granted; the shape is then that of a known model, or unknown. Raises :class:`ModelFactsError` if
    there is no such model, the hub does not answer, or ``HF_HUB_OFFLINE`` is set.
    """
    import httpx

    environ = os.environ if environ is None else environ
    if any(environ.get(name, "").lower() not in NO for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        raise ModelFactsError(f"model {model}: the hub is not asked, since HF_HUB_OFFLINE is set; unset it")
    if not HUB_ID.fullmatch(model) or ".." in model:
        raise ModelFactsError(f"model {model}: is not a hub id such as Qwen/Qwen3-8B-AWQ")
    base = (environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with httpx.Client(headers=headers, timeout=TIMEOUT_SECONDS, follow_redirects=True, max_redirects=5) as client:
            return _ask(_Hub(client, base), model, quote(revision or "main", safe=""))
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        reason = str(error) or type(error).__name__
        raise ModelFactsError(f"model {model}: the hub at {base} did not answer: {reason}; try again later") from error


class _Hub:
    """A connection to one hub."""

    def __init__(self, client: httpx.Client, base: str) -> None:
        self._client = client
        self.base = base

    def get(self, path: str) -> tuple[int, bytes]:
        """Return the status and body (limited to a config's size). Raises :class:`ModelFactsError` on a timeout."""
        until = time.monotonic() + TIMEOUT_SECONDS
        with self._client.stream("GET", f"{self.base}/{path}") as answer:
            body = bytearray()
            for part in answer.iter_bytes():
                body += part
                if len(body) > MOST_BYTES:
                    break
                if time.monotonic() > until:
                    raise ModelFactsError(
                        f"the hub at {self.base} answers too slowly: over {TIMEOUT_SECONDS:g}s; try again"
                    )
            return answer.status_code, bytes(body)


def _ask(hub: _Hub, model: str, revision: str) -> ModelFacts:
    about = _about(hub, model, revision)
    status, body = hub.get(f"{model}/resolve/{revision}/config.json")
    where = f"{hub.base}/{model}/config.json"
    if status == 404:
        status, body = hub.get(f"{model}/resolve/{revision}/params.json")
        where = f"{hub.base}/{model}/params.json"
    if status == 404:
        raise ModelFactsError(f"model {model}: holds no config.json, so that vLLM can't load it; choose another one")
    if status in _REFUSED:
        return replace(_sized(from_name(model), about), source="hub", gated=True)
    if status != 200:
        raise ModelFactsError(f"model {model}: the hub at {hub.base} answered with status {status}; try again later")
    config: Config = parse_json(body, where)
    if where.endswith("params.json"):
        config = config_from_params(config)
    facts = facts_from_config(model, config, _quant_config(hub, model, revision, about))
    return with_parameters(replace(_sized(facts, about), source="hub", gated=False))


def _quant_config(hub: _Hub, model: str, revision: str, about: Config) -> Config | None:
    """The file that Model Optimizer writes beside the config, if there is one."""
    if not any(text(entry, "rfilename") == _QUANT_CONFIG for entry in objects(about.get("siblings"))):
        return None
    status, body = hub.get(f"{model}/resolve/{revision}/{_QUANT_CONFIG}")
    return parse_json(body, f"{hub.base}/{model}/{_QUANT_CONFIG}") if status == 200 else None


def _about(hub: _Hub, model: str, revision: str) -> Config:
    """The hub API's data about a model; empty if access is denied."""
    status, body = hub.get(f"api/models/{model}/revision/{revision}?blobs=true")
    if status == 404:
        raise ModelFactsError(
            f"model {model}: is not on the hub at {hub.base}, or has no such revision; check its name"
        )
    if status == 401:
        raise ModelFactsError(
            f"model {model}: is not on the hub at {hub.base}, or is private; check its name, or give a token (HF_TOKEN)"
        )
    return parse_json(body, f"{hub.base}/api/models/{model}") if status == 200 else {}


def _sized(facts: ModelFacts, about: Config) -> ModelFacts:
    """Add facts from the file list: bytes to load, and parameters if the hub counted unquantized ones."""
    sizes: dict[str, int] = {}
    for entry in objects(about.get("siblings")):
        name, size = text(entry, "rfilename"), number(entry, "size")
        if name and size:
            sizes[name] = size
    total = sum(sizes[name] for name in weight_files(sizes)) or None
    counted = number(mapping(about, "safetensors"), "total") if facts.quantization is None else None
    return replace(
        facts,
        weight_bytes=total or facts.weight_bytes,
        bytes_to_download=total,
        parameters=counted or facts.parameters,
    )
