"""Downloading a model from the launch screen, from a local hub: confirmed first, canceled, resumed."""

from __future__ import annotations

import threading

import pytest

from fakes.hub import FakeHub
from vllm_console.fleet.downloads import ModelDownload
from vllm_console.ui.screens.dialogs import Confirm
from vllm_console.ui.screens.launch import LaunchScreen
from vllm_launchers.vllm.modelfacts.local import local_models

FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": bytes(range(256)) * 120_000}
CODED = {"config.json": b'{"auto_map": {}}', "m.py": b"pass"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with FakeHub({"org/new": FILES, "org/coded": CODED}, hold_after=22_000_000) as hub:
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "PYTHONPATH"):
            monkeypatch.delenv(name, raising=False)
        yield hub
        hub.released.set()


@pytest.fixture
def fleet(fakes):
    class Fleet(fakes.FakeFleet):
        def models(self):
            return local_models(())

        def model_download(self, model):
            return ModelDownload(model, ())

    return Fleet()


async def test_a_model_is_downloaded_after_a_question_and_escape_cancels(host, wait_until, fleet, hub):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: getattr(app.screen, "planner", None) and app.screen.planner.draft)
        screen = app.screen
        await pilot.press("tab", "enter")
        await wait_until(pilot, lambda: "d then downloads it from the hub" in " ".join(app.text().split()))
        await pilot.press("ctrl+u", *"org/new", "enter")
        await wait_until(
            pilot, lambda: "org/new is not on this machine: d downloads it" in " ".join(app.text().split())
        )

        await pilot.press("d")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
        await wait_until(pilot, lambda: "Download org/new?" in app.text() and "29 MiB to download" in app.text())
        await pilot.press("n")
        await wait_until(pilot, lambda: app.screen is screen)
        assert hub.got.count("model.safetensors") == 0

        await pilot.press("d")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("y")
        await wait_until(pilot, lambda: "org/new: downloading: " in app.text() and "esc cancels" in app.text())
        await wait_until(pilot, hub.held.is_set)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: "The model is still downloading" in app.text())
        await pilot.press("escape")
        await wait_until(pilot, lambda: "org/new: canceled; the next download keeps" in app.text())
        assert app.screen is screen, "escape canceled, and did not leave"
        hub.released.set()

        await pilot.press("d")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("y")
        await wait_until(pilot, lambda: "every file verified" in app.text())
        await wait_until(pilot, lambda: not screen.downloads.running)
        await pilot.press("enter")
        await wait_until(pilot, lambda: list(screen.picker.names) == ["org/new"])


async def test_it_does_not_ask_while_a_value_is_typed(host, wait_until, fleet, hub):
    answer, typing = fleet.model_download, threading.Event()

    def slowly(model):
        assert typing.wait(20)
        return answer(model)

    fleet.model_download = slowly
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=(120, 30)) as pilot:
        await wait_until(pilot, lambda: getattr(app.screen, "planner", None) and app.screen.planner.draft)
        screen = app.screen
        screen.planner.draft.put("model", "org/new")
        screen.go_to("name")
        await pilot.press("d", "enter")
        await wait_until(pilot, lambda: screen.editor.typing)
        typing.set()
        await wait_until(pilot, lambda: "org/new: 29 MiB to download; d downloads it." in " ".join(app.text().split()))
        assert app.screen is screen
        assert screen.editor.typing


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/none", "is not on the hub"),
        ("org/coded", "'vllm-console models get org/coded --with-code'"),
        ("/data/model", "is not a hub id"),
    ],
)
async def test_what_cannot_be_downloaded_from_there_is_reported(host, wait_until, fleet, hub, model, words):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=(120, 30)) as pilot:
        await wait_until(pilot, lambda: getattr(app.screen, "planner", None) and app.screen.planner.draft)
        app.screen.planner.draft.put("model", model)
        await pilot.press("d")
        await wait_until(pilot, lambda: words in " ".join(app.text().split()))
        assert not app.screen.downloads.running
    assert not hub.got.count("m.py")
