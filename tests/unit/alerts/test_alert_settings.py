"""``[alerts]`` in the config file."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_console.settings import Alerts, ConfigError, read_settings


def read(folder: Path, text: str) -> Alerts:
    path = folder / "config.toml"
    path.write_text(f"[alerts]\n{text}\n")
    return read_settings(path).alerts


def test_findings_go_only_to_the_log_by_default(tmp_path: Path) -> None:
    assert read(tmp_path, "") == Alerts(severity="warning", terminal=(), webhook="")


def test_all_alert_settings(tmp_path: Path) -> None:
    text = """
    severity = "critical"
    terminal = ["bell", "osc777"]
    webhook = "https://example.org/hook?x=1"
    webhook_header = "X-Key"
    webhook_header_env = "HOOK_KEY"
    """
    alerts = read(tmp_path, text)
    assert alerts == Alerts("critical", ("bell", "osc777"), "https://example.org/hook?x=1", "X-Key", "HOOK_KEY")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x", "http://[::1]:9", "http://localhost", "https://example.org"])
def test_secret_may_go_to_loopback_or_https_only(tmp_path: Path, url: str) -> None:
    assert read(tmp_path, f'webhook = "{url}"\nwebhook_header_env = "KEY"').webhook == url


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('webhok = "https://example.org"', "unknown key 'alerts.webhok'; did you mean 'alerts.webhook'?"),
        ('severity = "loud"', "severity"),
        ('severity = "good"', "severity"),
        ('terminal = ["siren"]', "terminal"),
        ('webhook = "ftp://example.org/private"', "alerts.webhook: expected a URL"),
        ('webhook = "https://"', "alerts.webhook: expected a URL"),
        ('webhook = "https://[bad"', "alerts.webhook: expected a URL"),
        ('webhook = "https://example.org:port/"', "alerts.webhook: expected a URL"),
        ('webhook = "https://example.org/a b"', "alerts.webhook: expected a URL"),
        ('webhook = "https://example.org"\nwebhook_header = "a: b"', "not an HTTP header name"),
        ('webhook = "http://example.org"\nwebhook_header_env = "KEY"', "requires https"),
        ('webhook_header_env = "KEY"', "alerts.webhook is not"),
    ],
)
def test_invalid_alert_settings_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert message in str(error.value)
    assert "config.toml" in str(error.value)
    assert "private" not in str(error.value)
