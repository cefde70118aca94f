"""LoRA adapters of the simulated engine: vLLM 0.32's runtime routes and metric. Adapters do not change answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_launchers.simulated.validation import ApiError, Field, read_body, string
from vllm_launchers.vllm.model_folder import AdapterError, read_adapter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_launchers.simulated.metrics import Metrics

_LOAD = {"lora_name": Field(string, required=True), "lora_path": Field(string, required=True)}
_UNLOAD = {"lora_name": Field(string, required=True)}


class RuntimeAdapters:
    """The adapters that a server serves: ``served`` maps their names to their folders, and is modified in place.

    ``most``: ``--max-loras``. ``rank``: ``--max-lora-rank``. Without ``enabled`` (``--enable-lora``) none can be
    loaded.
    """

    def __init__(
        self, served: dict[str, str], models: tuple[str, ...], metrics: Metrics, *, enabled: bool, most: int, rank: int
    ) -> None:
        self.served, self._models, self._metrics = served, models, metrics
        self._enabled, self._most, self._rank = enabled, most, rank

    def load(self, body: Any) -> str:
        """Load an adapter; returns the response text. Raises `ApiError`."""
        fields = read_body(body, _LOAD)
        name, path = fields["lora_name"], fields["lora_path"]
        if not name or not path:
            raise ApiError(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self._models:
            text = f"The lora adapter '{name}' conflicts with a served base model."
            raise ApiError(400, "InvalidUserInput", text)
        if name in self.served:
            text = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
            raise ApiError(400, "InvalidUserInput", text)
        if not self._enabled:
            raise _failed("LoRA is not enabled.")
        try:
            found = read_adapter(Path(path))
        except AdapterError as error:
            text = f"Loading lora {name} failed: No adapter found for {path}"
            raise ApiError(404, "NotFoundError", text) from error
        if found.rank > self._rank:
            raise _failed(f"LoRA rank {found.rank} is greater than max_lora_rank {self._rank}.")
        self.served[name] = path
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: Any) -> str:
        """Stop serving an adapter; returns the response text. Raises `ApiError`."""
        name = read_body(body, _UNLOAD)["lora_name"]
        if name not in self.served:
            raise ApiError(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        del self.served[name]
        return f"Success: LoRA adapter '{name}' removed successfully."

    def note(self, names: Iterable[str]) -> None:
        """Update the metric with the adapters in use. Like vLLM, lists them both as running and as waiting."""
        if self._enabled:
            self._metrics.adapters(",".join(sorted(set(names))), self._most, time.time())


def _failed(why: str) -> ApiError:
    text = (
        f"Call to add_lora method failed: Worker failed with error '{why}', please check the stack trace above for the "
        "root cause"
    )
    return ApiError(500, "InternalServerError", text)
