"""LoRA adapters of a running server: list them, and load and unload them through vLLM's runtime routes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_console.metrics.parse import NotMetricsError, parse_metrics
from vllm_console.metrics.window import combine
from vllm_console.text import UNKNOWN, count, size
from vllm_launchers.errors import NotFoundError, OperationError, RefusedError, UsageError
from vllm_launchers.host.main_memory import main_memory
from vllm_launchers.keeper.records import ServerRecord, State
from vllm_launchers.keeper.server_client import Response, client_of
from vllm_launchers.launch.details import unpack
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.checks.request import ranks
from vllm_launchers.plan.flags import LORA
from vllm_launchers.secrets import API_KEY
from vllm_launchers.units import GIB
from vllm_launchers.vllm.flags.changes import whole_number
from vllm_launchers.vllm.model_folder import RUNTIME_LORA, AdapterError, AdapterFolder, read_adapter, updates_adapters

LOAD_SECONDS = 300.0
"""Long enough to read an adapter from a slow disk while the engine is busy."""
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_HIDDEN = lazy_pattern(r"[\x00-\x1f\x7f-\x9f,]")


class Adapter(msgspec.Struct, frozen=True):
    """An adapter that a server serves as ``name``.

    ``rank`` and ``size`` (bytes) are None if its folder can't be read here; ``running`` and ``waiting`` say whether it
    has such requests, None if unknown.
    """

    name: str
    path: str
    base_model: str
    rank: int | None = None
    size: int | None = None
    running: bool | None = None
    waiting: bool | None = None


class Adapters(msgspec.Struct, frozen=True):
    """A server's adapters, and the limits of its flags; limits are None without ``--enable-lora``."""

    server: str
    enabled: bool
    updates: bool
    """Whether the server has the routes to load and unload adapters."""
    max_loras: int | None
    max_cpu_loras: int | None
    max_lora_rank: int | None
    adapters: tuple[Adapter, ...]

    @property
    def fixed(self) -> str:
        """Why adapters can't be loaded or unloaded, as a sentence with the command to change it; empty if they can."""
        if not (why := self.unable):
            return ""
        lead = ". To allow that" if self.enabled else "; to serve adapters"
        return f"{why}{lead}: {self.command_for(self.server)}"

    def command_for(self, name: str) -> str:
        """The command that restarts this server, or one like it, so that adapters can be loaded."""
        lora = "" if self.enabled else f" --set {LORA}=true"
        return f"vllm-console restart {name}{lora}{'' if self.updates else f' --env {RUNTIME_LORA}=true'}"

    @property
    def unable(self) -> str:
        """A sentence explaining why adapters can't be loaded or unloaded; empty if they can."""
        if not self.enabled:
            return f"{self.server} runs without --{LORA}"
        if self.updates:
            return ""
        routes = f"{self.server} has no routes to load adapters"
        return f"{routes}: it runs without {RUNTIME_LORA}, which lets all its clients load them"


class Loaded(msgspec.Struct, frozen=True):
    """The result of loading or unloading an adapter; ``notes`` are sentences about what to expect."""

    server: str
    name: str
    path: str
    notes: tuple[str, ...] = ()


class ServerAdapters:
    """The adapters of one server. Every method sends requests to it, blocks, and raises OperationError if the server is
    not ready or does not answer.
    """

    def __init__(self, record: ServerRecord) -> None:
        if record.current.spec.node is not None and record.current.spec.node.headless:
            raise RefusedError(f"{record.name} is {record.current.spec.node.text}: it serves no requests; node 0 does")
        if record.server is None or record.state is not State.READY:
            raise OperationError(
                f"{record.name} is {record.state}, not ready: its adapters can be listed once it is ready"
            )
        self._name, self._details = record.name, unpack(record.current.spec.details)
        self._client = client_of(record, record.server)

    def served(self) -> Adapters:
        """The adapters it serves."""
        flags, enabled = self._details.flags, self._enabled
        most = whole_number(flags, "max-loras") if enabled else None
        return Adapters(
            self._name,
            enabled,
            self._has_routes,
            most,
            whole_number(flags, "max-cpu-loras", most) if most is not None else None,
            whole_number(flags, "max-lora-rank", 16) if enabled else None,
            self._cards(*self._in_use()) if enabled else (),
        )

    def load(self, name: str, folder: str) -> Loaded:
        """Load an adapter from a folder, and serve it as ``name``.

        Raises:
            UsageError: the name is invalid, or the folder holds no adapter.
            RefusedError: it can't be loaded: no LoRA, no routes, rank too high, too little memory.
            OperationError: vLLM refuses it.
        """
        if not name or _HIDDEN.search(name):
            raise UsageError("an adapter's name must not be empty or contain commas or control characters")
        before = self._require_updates()
        served = {one.name for one in before.adapters}
        if name in served:
            raise RefusedError(f"{self._name} already serves an adapter '{name}': unload it, or use another name")
        adapter = read_adapter(Path(folder).expanduser().absolute())
        self._check(adapter, before)
        answer = self._ask("POST", LOAD, {"lora_name": name, "lora_path": str(adapter.path)}, LOAD_SECONDS)
        self._require(answer, f"{name} was not loaded")
        return Loaded(self._name, name, str(adapter.path), tuple(self._notes(adapter, before)))

    def unload(self, name: str) -> Loaded:
        """Unload an adapter. Its running requests finish normally.

        Raises:
            NotFoundError: the server has no adapter of that name.
            RefusedError: the server has no route for it.
        """
        found = next((one for one in self._require_updates().adapters if one.name == name), None)
        if found is None:
            raise NotFoundError(f"{self._name} serves no adapter '{name}'; see 'vllm-console lora list {self._name}'")
        self._require(self._ask("POST", UNLOAD, {"lora_name": name}), f"{name} was not unloaded")
        named = self._details.flags.get("lora-modules")
        notes = ("--lora-modules names adapters: one of these is served again after a restart",) if named else ()
        return Loaded(self._name, name, found.path, notes)

    # -- checks ----------------------------------------------------------------------------------------------------

    @property
    def _has_routes(self) -> bool:
        """Whether it has the routes to load and unload adapters. Without LoRA, don't ask: vLLM would log a 404."""
        if not self._enabled:
            return updates_adapters(self._details.environment)
        return self._ask("GET", LOAD).status == 405  # it exists, and accepts POST

    @property
    def _enabled(self) -> bool:
        return self._details.flags.get(LORA) is True

    def _require_updates(self) -> Adapters:
        found = self.served()
        if found.fixed:
            raise RefusedError(found.fixed)
        return found

    def _check(self, adapter: AdapterFolder, before: Adapters) -> None:
        """Raise RefusedError if vLLM would not load the adapter, or the host lacks the memory."""
        if before.max_lora_rank is not None and adapter.rank > before.max_lora_rank:
            needed = adapter.needed_rank
            fix = (
                f"vllm-console restart {self._name} --set max-lora-rank={needed}"
                if needed is not None
                else "vLLM supports no --max-lora-rank that high"
            )
            raise RefusedError(f"its rank is {adapter.rank}, and --max-lora-rank is {before.max_lora_rank}: {fix}")
        workers, free = ranks(self._details.flags), main_memory().available_gib
        if free is not None and adapter.size * workers > free * GIB:
            each = f" in each of {workers} workers" if workers > 1 else ""
            raise RefusedError(
                f"its weights take {size(adapter.size)} of host memory{each}, and {size(free * GIB)} are available"
            )

    def _notes(self, adapter: AdapterFolder, before: Adapters) -> list[str]:
        notes = []
        if adapter.base_model and not self._based_on(adapter.base_model):
            notes.append(f"it was trained on {adapter.base_model}, and {self._name} serves {self._details.model}")
        many = len(before.adapters) + 1
        if before.max_cpu_loras is not None and many > before.max_cpu_loras:
            notes.append(
                f"it serves {many} adapters and keeps {before.max_cpu_loras} in host memory (--max-cpu-loras): the "
                "least recently used are reloaded from disk"
            )
        elif before.max_loras is not None and many > before.max_loras:
            notes.append(
                f"it serves {many} adapters, and one batch has requests of {before.max_loras} at most (--max-loras): "
                "those of others wait"
            )
        notes.append("it is gone after a restart: name it in --lora-modules to keep it")
        return notes

    def _based_on(self, base: str) -> bool:
        """Whether a model name may mean the served model: folder names and hub ids end alike."""
        own = self._details.model
        return base.rstrip("/").rpartition("/")[2].lower() == own.rstrip("/").rpartition("/")[2].lower()

    # -- requests --------------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: object = None, seconds: float | None = None) -> Response:
        try:
            return self._client.ask(method, path, body, seconds=seconds)
        except OSError as error:
            raise OperationError(f"{self._name} did not answer: {error}") from error

    def _require(self, answer: Response, failed: str) -> None:
        if answer.status == 401:
            raise RefusedError(f"{self._name} has an API key: set {API_KEY} to it")
        if answer.status != 200:
            raise OperationError(f"{failed}: {self._name} answered {answer.message}")

    def _in_use(self) -> tuple[frozenset[str] | None, float | None, float | None]:
        """The adapters with requests, and the numbers of running and waiting requests."""
        body = self._ask("GET", "/metrics").body.decode(errors="replace")
        try:
            engines = combine(parse_metrics(body, 0.0).engines.values())
        except NotMetricsError:
            return None, None, None
        return adapters_with_requests(body), engines.requests_running, engines.requests_waiting

    def _cards(self, used: frozenset[str] | None, running: float | None, waiting: float | None) -> tuple[Adapter, ...]:
        answer = self._ask("GET", "/v1/models")
        self._require(answer, "its adapters are unknown")
        data = (answer.document or {}).get("data")
        cards = [one for one in data if isinstance(one, dict)] if isinstance(data, list) else []
        return tuple(_adapter(card, used, running, waiting) for card in cards if card.get("parent") and card.get("id"))


def _adapter(
    card: Mapping[str, Any], used: frozenset[str] | None, running: float | None, waiting: float | None
) -> Adapter:
    name, path = str(card["id"]), str(card.get("root") or "")
    try:
        folder = read_adapter(Path(path)) if Path(path).is_absolute() else None
    except AdapterError:
        folder = None
    return Adapter(
        name,
        path,
        str(card["parent"]),
        folder.rank if folder is not None else None,
        folder.size if folder is not None else None,
        _some(name, used, running, waiting),
        _some(name, used, waiting, running),
    )


def _some(name: str, used: frozenset[str] | None, these: float | None, others: float | None) -> bool | None:
    """Whether an adapter has requests of one kind, from which adapters have any and how many of each kind exist."""
    if these == 0 or (used is not None and name not in used):
        return False
    return True if used is not None and others == 0 else None


LORA_INFO = "vllm:lora_requests_info"
_LINE = lazy_pattern(rf"^{LORA_INFO}\{{(.*)\}} ([0-9.eE+]+)\s*$", re.MULTILINE)
_LABEL = lazy_pattern(r'(\w+)="((?:[^"\\]|\\.)*)"')


def adapters_with_requests(body: str) -> frozenset[str] | None:
    """The adapters that had requests at the newest step; None if the server reports none.

    The gauge's value is the time of writing (Unix seconds), and each set of names is its own series, so the newest one
    counts. vLLM 0.32 lists an adapter in both labels, running and waiting, as soon as it has either, so the labels do
    not distinguish them.
    """
    found = max(((float(value), labels) for labels, value in _LINE.findall(body) if _is_number(value)), default=None)
    if found is None:
        return None
    labels = dict(_LABEL.findall(found[1]))
    names = ",".join(labels.get(f"{state}_lora_adapters", "") for state in ("running", "waiting"))
    return frozenset(re.sub(r"\\(.)", r"\1", name) for name in names.split(",") if name)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def request_states(adapter: Adapter) -> str:
    """The kinds of requests an adapter has: ``running``, ``waiting``, both, ``none``, or unknown."""
    if adapter.running is None and adapter.waiting is None:
        return UNKNOWN
    states = [word for word, has in (("running", adapter.running), ("waiting", adapter.waiting)) if has]
    return ", ".join(states) or "none"


def limits_text(found: Adapters) -> str:
    """The adapter limits of a server's flags, as text."""
    batch, host = count(found.max_loras), count(found.max_cpu_loras)
    return f"at most {batch} per batch, {host} in host memory, rank {found.max_lora_rank}"
