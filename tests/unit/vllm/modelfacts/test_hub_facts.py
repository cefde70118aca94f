"""The hub is only contacted on request; here it is a small server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vllm_launchers.vllm.modelfacts.facts import ModelFacts, ModelFactsError, Quantization
from vllm_launchers.vllm.modelfacts.hub import facts_from_hub

API = "/api/models/{}/revision/main?blobs=true"
FILE = "/{}/resolve/main/{}"


@dataclass
class Hub:
    """Responses by path: (status, body) or a redirect location; records requests and their tokens."""

    answers: dict[str, tuple[int, bytes] | str] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    endpoint: str = ""
    held: threading.Event = field(default_factory=threading.Event)

    def puts(self, model: str, config: Any, about: dict[str, Any] | None = None) -> None:
        """Offer a model."""
        self.answers[API.format(model)] = (200, json.dumps(about or {}).encode())
        self.answers[FILE.format(model, "config.json")] = (200, json.dumps(config).encode())

    def read(self, model: str, **more: Any) -> ModelFacts:
        """Read facts from this hub."""
        return facts_from_hub(model, environ={"HF_ENDPOINT": self.endpoint}, **more)


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    """The request handler of ``hub``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append((self.path, self.headers.get("Authorization")))
            answer = hub.answers.get(self.path, (404, b"{}"))
            if answer == "hold":
                hub.held.wait(30)
                return
            if isinstance(answer, str):
                self.send_response(307)
                self.send_header("Location", answer)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(answer[1])))
            self.end_headers()
            try:
                self.wfile.write(answer[1])
            except OSError:
                return

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    served = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(served))
    served.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield served
    served.held.set()
    server.shutdown()
    server.server_close()
    thread.join()


ABOUT: dict[str, Any] = {
    "gated": False,
    "siblings": [
        {"rfilename": "model-00001-of-00002.safetensors", "size": 3000},
        {"rfilename": "model-00002-of-00002.safetensors", "size": 1000},
        {"rfilename": "original/consolidated.00.pth", "size": 9000},
        {"rfilename": "pytorch_model.bin", "size": 8000},
        {"rfilename": "README.md", "size": 5},
    ],
    "safetensors": {"parameters": {"BF16": 1990}, "total": 1990},
}


def test_model_on_the_hub(hub: Hub, make: Any) -> None:
    hub.puts("org/some", make.config, ABOUT)
    facts = hub.read("org/some", token="hf_secret")
    assert (facts.model, facts.source, facts.folder, facts.gated) == ("org/some", "hub", None, False)
    assert (len(facts.layers), facts.kv_heads, facts.max_context) == (2, 2, 4096)
    assert (facts.weight_bytes, facts.bytes_to_download, facts.parameters) == (4000, 4000, 1990)
    assert facts.missing == ()
    assert {token for _, token in hub.asked} == {"Bearer hf_secret"}
    assert len(hub.asked) == 2


def test_endpoint_and_revision(hub: Hub, make: Any) -> None:
    hub.answers["/api/models/org/some/revision/v2%2Fa?blobs=true"] = (200, b"{}")
    hub.answers["/org/some/resolve/v2%2Fa/config.json"] = (200, json.dumps(make.config).encode())
    facts = facts_from_hub("org/some", revision="v2/a", environ={"HF_ENDPOINT": hub.endpoint + "/"})
    assert len(facts.layers) == 2
    assert any("size of the weights" in word for word in facts.missing)


def test_packed_numbers_of_a_quantized_model_are_not_its_parameters(hub: Hub, make: Any) -> None:
    hub.puts("org/some-7b", {**make.config, "quantization_config": {"quant_method": "awq", "bits": 4}}, ABOUT)
    facts = hub.read("org/some-7b")
    assert facts.quantization == Quantization("awq", 4)
    assert (facts.weight_bytes, facts.parameters) == (4000, None)


def test_quantization_of_model_optimizer_is_in_a_file_of_its_own(hub: Hub, make: Any) -> None:
    name = "hf_quant_config.json"
    quantized = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    hub.puts("org/some", make.config, {**ABOUT, "siblings": [*ABOUT["siblings"], {"rfilename": name, "size": 70}]})
    hub.answers[FILE.format("org/some", name)] = (200, json.dumps(quantized).encode())
    facts = hub.read("org/some")
    assert (facts.quantization, facts.parameters) == (Quantization("modelopt", 8), None)


def test_mistral_file_as_a_fallback(hub: Hub) -> None:
    hub.answers[API.format("org/m")] = (200, b"{}")
    params = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "vocab_size": 512}
    hub.answers[FILE.format("org/m", "params.json")] = (200, json.dumps(params).encode())
    assert len(hub.read("org/m").layers) == 3


def test_redirected_file(hub: Hub, make: Any) -> None:
    hub.puts("org/some", make.config)
    hub.answers[FILE.format("org/some", "config.json")] = "/elsewhere"
    hub.answers["/elsewhere"] = (200, json.dumps(make.config).encode())
    assert len(hub.read("org/some").layers) == 2


@pytest.mark.parametrize("status", [401, 403])
def test_gated_model(hub: Hub, status: int) -> None:
    for model in ("org/unheard-7b", "meta-llama/Llama-3.1-8B"):
        hub.answers[API.format(model)] = (200, json.dumps(ABOUT).encode())
        hub.answers[FILE.format(model, "config.json")] = (status, b"no")
    facts = hub.read("org/unheard-7b")
    assert (facts.source, facts.gated, facts.weight_bytes, facts.layers) == ("hub", True, 4000, ())
    known = hub.read("meta-llama/Llama-3.1-8B")
    assert (known.gated, len(known.layers)) == (True, 32)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda hub: None, "is not on the hub"),
        (lambda hub: hub.answers.update({API.format("org/some"): (401, b"")}), "is private"),
        (lambda hub: hub.answers.update({API.format("org/some"): (200, b"{}")}), "holds no config.json"),
        (lambda hub: hub.answers.update({API.format("org/some"): (200, b"[]")}), "no JSON object"),
        (lambda hub: hub.puts("org/some", [1]), "no JSON object"),
        (lambda hub: hub.puts("org/some", " " * (17 * 2**20)), "longer than 16 MiB"),
        (
            lambda hub: hub.answers.update(
                {API.format("org/some"): (500, b""), FILE.format("org/some", "config.json"): (503, b"")}
            ),
            "status 503",
        ),
        (lambda hub: hub.answers.update({API.format("org/some"): API.format("org/some")}), "did not answer"),
    ],
    ids=["absent", "private", "no config", "odd list", "odd config", "endless", "down", "circle"],
)
def test_errors_are_reported_in_a_sentence(hub: Hub, change: Callable[[Hub], None], part: str) -> None:
    change(hub)
    with pytest.raises(ModelFactsError) as caught:
        hub.read("org/some")
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hanging_hub_times_out(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_launchers.vllm.modelfacts.hub.TIMEOUT_SECONDS", 0.2)
    hub.answers[API.format("org/some")] = "hold"
    with pytest.raises(ModelFactsError, match="did not answer"):
        hub.read("org/some")


def test_unreachable_hub() -> None:
    with pytest.raises(ModelFactsError, match="did not answer"):
        facts_from_hub("org/some", environ={"HF_ENDPOINT": "http://127.0.0.1:9"})
    for endpoint in ("nonsense", "http://[", "ftp://127.0.0.1"):
        with pytest.raises(ModelFactsError, match="did not answer"):
            facts_from_hub("org/some", environ={"HF_ENDPOINT": endpoint})


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_mode_sends_no_request(hub: Hub, make: Any, name: str) -> None:
    hub.puts("org/some", make.config)
    with pytest.raises(ModelFactsError, match="not asked"):
        facts_from_hub("org/some", environ={"HF_ENDPOINT": hub.endpoint, name: "1"})
    assert hub.asked == []
    assert facts_from_hub("org/some", environ={"HF_ENDPOINT": hub.endpoint, name: "0"}).source == "hub"


@pytest.mark.parametrize("model", ["/a/folder", "./x", "a/b/c", "org/../x", "", "org/na me", "org/x?y=1"])
def test_invalid_hub_id_is_not_requested(hub: Hub, model: str) -> None:
    with pytest.raises(ModelFactsError, match="not a hub id"):
        hub.read(model)
    assert hub.asked == []
