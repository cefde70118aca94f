"""An error in ``config.toml`` is reported with the file, the key and the expected value."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_console.settings import ConfigError, read_settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys = { restart = 1 }", "keys.restart: expected a string, not a number"),
        ("keys = 3", "keys: expected a table, not a number"),
        ('layout = "x"', 'layout: expected "auto" or "overview" or "focus" or "wide" or "tall", not "x"'),
        ('read_only = "yes"', "read_only: expected true or false, not a string"),
        ("refresh_seconds = true", "refresh_seconds: expected a number, not true"),
        ('vllm = "/opt"', "vllm: expected a list, each entry a string, not a string"),
        ("vllm = [1]", "vllm: expected a list, each entry a string, not that list"),
        ("shares = { 0 = [] }", "shares.0: expected a string or a number, not a list"),
        ("reserve = { 0 = inf }", "reserve: GPU 0: 'inf' is not a valid share of its memory; expected '24 GiB'"),
        ("prepare_launches = true", 'prepare_launches: expected "auto" or "on" or "off", not true'),
        ("alerts = 1", "alerts: expected a table, not a number"),
        ("alerts = { webhook = 1979-05-27 }", "alerts.webhook: expected a string, not a date or time"),
        ('alerts = { severity = "loud" }', 'alerts.severity: expected "critical" or "warning" or "note", not "loud"'),
    ],
)
def test_error_names_the_key_and_the_expected_value(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_settings(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_named_config_file_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_settings(tmp_path / "none.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read_settings().sources == {}
    assert read_settings(Path(os.devnull)).sources == {}


def test_pipe_is_not_a_config_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_settings(tmp_path / "config.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("price = 0.3", "unknown key 'energy.price'"),
        ('price_per_kwh = "0.3"', "energy.price_per_kwh: expected a number, not a string"),
        ("price_per_kwh = -0.1", "energy.price_per_kwh must be between 0 and"),
        ("price_per_kwh = nan", "energy.price_per_kwh must be between 0 and"),
        ("price_per_kwh = inf", "energy.price_per_kwh must be between 0 and"),
        ('currency = ""', "energy.currency: expected up to 8 characters"),
        ('currency = "E\\u001b[2J"', "energy.currency: expected up to 8 characters"),
        ('currency = "nine chars"', "energy.currency: expected up to 8 characters"),
    ],
)
def test_invalid_price_is_refused(tmp_path, text, message):
    path = tmp_path / "config.toml"
    path.write_text(f"[energy]\n{text}\n")
    with pytest.raises(ConfigError) as error:
        read_settings(path)
    assert message in str(error.value)
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "kept", "message"),
    [
        ('ascii = true\nrefesh_seconds = 2\ntheme = "dark"', {"ascii": True, "theme": "dark"}, "unknown key 'refesh_"),
        ("refresh_seconds = 900\nascii = true", {"ascii": True, "refresh_seconds": 1.0}, "must be between"),
        ("read_only = yes", {"read_only": True}, "not valid TOML"),
        ("ascii = tru\n  read_only=true", {"read_only": True, "ascii": False}, "not valid TOML"),
        ("ascii = tru\nread_only = false", {"read_only": False}, "not valid TOML"),
        ("read_onyl = true", {"read_only": True}, "did you mean 'read_only'"),
        ("read_onyl = false", {"read_only": False}, "did you mean 'read_only'"),
        ('read_only = "true"', {"read_only": True}, "read_only: expected true or false"),
        ("\udcff", {"read_only": False}, "not UTF-8"),
    ],
)
def test_invalid_setting_is_skipped_except_read_only(
    tmp_path: Path, text: str, kept: dict[str, object], message: str
) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    found = read_settings(path, forgiving=True)
    assert {name: getattr(found, name) for name in kept} == kept
    assert [message in mistake for mistake in found.mistakes] == [True], found.mistakes


def test_administrators_invalid_setting_is_never_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound, own = tmp_path / "admin.toml", tmp_path / "config.toml"
    bound.write_text("board = 1")
    own.write_text("ascii = true")
    monkeypatch.setattr("vllm_console.settings.ADMIN_CONFIG", bound)
    monkeypatch.setattr("vllm_console.settings.ADMIN_UID", os.getuid())
    tmp_path.chmod(0o755)
    bound.chmod(0o644)
    with pytest.raises(ConfigError, match="board: expected a string"):
        read_settings(own, forgiving=True)
