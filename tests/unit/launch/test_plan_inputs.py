"""The inputs of a plan are collected once and kept while they are valid."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from vllm_launchers.launch import inputs_reader
from vllm_launchers.launch.inputs_reader import PlanInputsReader
from vllm_launchers.launch.resolved_request import ResolvedRequest
from vllm_launchers.presets.load import read_presets
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.flags.flag_table import FlagsUnknownError, FlagTable

VLLM = Engine(EngineKind.VLLM, ("/opt/vllm/bin/vllm",), "0.32.0", "cuda", "/opt/vllm/bin/vllm")
SIMULATED = Engine(EngineKind.SIMULATED, ("python",), "0.33.0", "simulated", "python")
LEARNED = FlagTable("0.32.0", "installation", {})


class Cache:
    """Replaces the cache on disk."""

    known: FlagTable | None = None
    learnable = True
    learned = 0

    def get(self, engine: Engine) -> FlagTable | None:
        return self.known

    def learn(self, engine: Engine) -> FlagTable:
        self.learned += 1
        if not self.learnable:
            raise FlagsUnknownError("its source is not there")
        self.known = LEARNED
        return LEARNED


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    cache = Cache()
    monkeypatch.setattr(inputs_reader, "FlagCache", lambda: cache)
    return cache


def test_command_learns_flags_immediately_and_once(cache: Cache) -> None:
    known = PlanInputsReader()
    assert known.flags(VLLM) is LEARNED
    assert known.flags(VLLM) is LEARNED
    assert cache.learned == 1


def test_unlearnable_flags_come_from_the_release(cache: Cache) -> None:
    cache.learnable = False
    table = PlanInputsReader().flags(VLLM)
    assert (table.source, table.version) == ("release", "0.32.0")


@pytest.mark.parametrize("version", [None, "nightly", "0.6.3", "0.99.0"])
@pytest.mark.parametrize("path", ["", "/x"])
def test_flags_of_an_unknown_version_are_assumed(cache: Cache, version: str | None, path: str) -> None:
    cache.learnable = False
    assert PlanInputsReader().flags(Engine(EngineKind.VLLM, ("/x",), version, None, path)).assumed


def test_console_continues_while_flags_are_learned(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, done = threading.Event(), threading.Event(), threading.Event()
    runs: list[Any] = []

    def run(words: list[str], **more: Any) -> None:
        runs.append(words)
        begun.set()
        go.wait(20)
        cache.known = LEARNED
        done.set()

    monkeypatch.setattr(inputs_reader.subprocess, "run", run)
    known = PlanInputsReader(patient=False)
    first = known.flags(VLLM)
    assert first is not None
    assert first.source == "release"
    assert begun.wait(20)
    assert known.flags(VLLM) == first  # requested again while it runs: not started twice
    go.set()
    assert done.wait(20)
    assert known.flags(VLLM) is LEARNED
    assert len(runs) == 1
    assert runs[0][-1] == VLLM.path
    assert cache.learned == 0  # it ran in a separate process


@pytest.mark.parametrize("engine", [SIMULATED, Engine(EngineKind.VLLM, ("vllm",), "0.30.0", "cuda", "")])
def test_engine_without_files_has_its_releases_flags(cache: Cache, engine: Engine) -> None:
    table = PlanInputsReader().flags(engine)
    assert table.version == engine.version
    assert cache.learned == 0


def test_model_facts_are_reread_when_files_change(cache: Cache, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\0" * 64)
    known = PlanInputsReader()

    def length() -> int | None:
        facts = known.model(str(folder), {}, {}, token=None).facts
        assert facts is not None
        return facts.max_context

    assert length() == 4096
    same = known.model(str(folder), {}, {}, token=None)
    assert known.model(str(folder), {}, {}, token=None) is same
    (folder / "other.json").write_text("{}")  # changes the folder's modification time
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    assert length() == 8192


def test_folder_without_a_model_says_why(cache: Cache, tmp_path: Path) -> None:
    found = PlanInputsReader().model(str(tmp_path), {}, {}, token=None)
    assert found.facts is None
    assert "config.json" in found.problem


def test_hub_is_queried_only_on_request_for_missing_models(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm_launchers.vllm.modelfacts import hub
    from vllm_launchers.vllm.modelfacts.facts import ModelFacts, ModelFactsError

    asked: list[str] = []

    def ask(model: str, token: str | None, **more: Any) -> ModelFacts:
        asked.append(model)
        if model == "org/gone":
            raise ModelFactsError("model org/gone: is not on the hub")
        return ModelFacts(model, source="hub")

    monkeypatch.setattr(hub, "facts_from_hub", ask)
    known, here = PlanInputsReader(), {"HF_HOME": str(tmp_path)}
    silent = known.model("org/some-7b", {}, here, token=None).facts
    assert silent is not None
    assert silent.source == "table"
    assert asked == []
    for _ in range(2):
        facts = known.model("org/some-7b", {}, here, from_hub=True, token=None).facts
        assert facts is not None
        assert facts.source == "hub"
    assert asked == ["org/some-7b"]
    assert "not on the hub" in known.model("org/gone", {}, here, from_hub=True, token=None).problem


def test_facts_from_the_hub_are_those_of_the_revision_and_token(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm_launchers.vllm.modelfacts import hub
    from vllm_launchers.vllm.modelfacts.facts import ModelFacts

    def ask(model: str, token: str | None, *, revision: str | None, **more: Any) -> ModelFacts:
        return ModelFacts(model, source="hub", architecture=f"{revision} {token}")

    monkeypatch.setattr(hub, "facts_from_hub", ask)
    reader, here = PlanInputsReader(), {"HF_HOME": str(tmp_path)}

    def asked(revision: str, token: str | None) -> str | None:
        facts = reader.model("org/some-7b", {"revision": revision}, here, from_hub=True, token=token).facts
        assert facts is not None
        return facts.architecture

    assert [asked("v1", None), asked("v2", None), asked("v2", "hf_x")] == ["v1 None", "v2 None", "v2 hf_x"]


def test_files_are_looked_for_only_where_this_machine_runs_the_engine(cache: Cache, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.jinja")

    def absent(engine: Engine) -> tuple[str, ...]:
        changes = Changes({"chat-template": gone}, ())
        request = ResolvedRequest(
            read_presets(None)[0]["chatbot"], engine, changes, str(tmp_path), "127.0.0.1", 8000, {}
        )
        return PlanInputsReader().gather(request, None, ()).environment.absent

    assert absent(VLLM) == (gone,)
    assert absent(SIMULATED) == ()
    cache.known, cache.learnable = None, False  # a wrapper, for example of a container
    assert absent(VLLM) == ()
