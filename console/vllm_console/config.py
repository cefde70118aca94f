"""A person's settings: ``config.toml`` in the config folder, checked key by key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from vllm_launchers.machine.gpu.sharing import Share

MAX_BYTES = 256 * 1024
"""A config file larger than this is not one."""

MOST_DIGITS = 4
"""No index of a GPU is longer."""


class ConfigError(Exception):
    """A config file that cannot be used; the text is one sentence that names file, key and what was expected."""


class Alerts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[alerts]``: how findings are told, from which severity on. The log has them all.

    ``terminal`` says how the terminal rings; ``webhook`` is a URL that gets JSON, with ``webhook_header`` set to what
    the environment variable named by ``webhook_header_env`` holds: a secret never stands in the file.
    """

    severity: Literal["critical", "warning", "note"] = "warning"
    terminal: tuple[Literal["bell", "osc9", "osc777"], ...] = ()
    webhook: str = ""
    webhook_header: str = "Authorization"
    webhook_header_env: str = ""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``config.toml``. ``vllm`` lists further installations; ``keys`` maps an action's id to another key;
    ``shares`` a GPU's index to the most that this person's servers may hold of it (``"24 GiB"``, ``"50 %"``);
    ``reserve`` a GPU's index to what must stay free of it for other tenants, written alike; ``alerts`` says how
    findings are told.
    """

    vllm: tuple[str, ...] = ()
    refresh_seconds: float = 1.0
    read_only: bool = False
    ascii: bool = False
    keys: Mapping[str, str] = {}
    shares: Mapping[str, str | float] = {}
    reserve: Mapping[str, str | float] = {}
    alerts: Alerts = Alerts()


def gpu_shares(config: Config) -> tuple[Share, ...]:
    """The most that this person's servers may hold of each GPU.

    Raises:
        ConfigError: a key is no index of a GPU, or a value is no share.
    """
    return _parts("shares", config.shares)


def gpu_reserves(config: Config) -> tuple[Share, ...]:
    """What must stay free of each GPU for other tenants.

    Raises:
        ConfigError: a key is no index of a GPU, or a value is no part of one.
    """
    return _parts("reserve", config.reserve)


def _parts(name: str, parts: Mapping[str, str | float]) -> tuple[Share, ...]:
    if not parts:
        return ()
    from vllm_launchers.machine.gpu.errors import HostError
    from vllm_launchers.machine.gpu.sharing import parse_share

    for key in parts:
        if not (key.isascii() and key.isdigit() and len(key) <= MOST_DIGITS):
            raise ConfigError(f"{name}: '{key[:40]}' is no GPU; expected its index, such as 0 = \"24 GiB\"")
    try:
        return tuple(parse_share(int(key), value) for key, value in parts.items())
    except HostError as error:
        raise ConfigError(f"{name}: {error}") from error


def config_folder() -> Path:
    """``$XDG_CONFIG_HOME/vllm-console``, by default ``~/.config/vllm-console``."""
    from platformdirs import user_config_path

    return user_config_path("vllm-console")


def read_config(path: Path | None = None) -> Config:
    """Read the config file; a missing one means defaults.

    Raises:
        ConfigError: it cannot be read, is no TOML, or a key is unknown or of the wrong type.
    """
    path = path or config_folder() / "config.toml"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES // 1024} KiB; that is no config file")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Config()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    import tomllib  # most people have no config file, and every command would pay for it

    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    _refuse_unknown(path, document, Config)
    if isinstance(alerts := document.get("alerts"), dict):
        _refuse_unknown(path, alerts, Alerts, "alerts.")
    try:
        config = msgspec.convert(document, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not 0.1 <= config.refresh_seconds <= 60:
        raise ConfigError(f"{path}: refresh_seconds must lie between 0.1 and 60, not {config.refresh_seconds}")
    try:
        gpu_shares(config)
        gpu_reserves(config)
        _check_alerts(config.alerts)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return config


def _refuse_unknown(path: Path, table: Mapping[str, object], shape: type[msgspec.Struct], within: str = "") -> None:
    known = [field.name for field in msgspec.structs.fields(shape)]
    for key in table:
        if key not in known:
            import difflib

            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean '{within}{near[0]}'?" if near else f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{path}: unknown key '{within}{key}'{hint}")


def _check_alerts(alerts: Alerts) -> None:
    """That the webhook can be asked, and that its secret cannot be read on the way."""
    if not alerts.webhook:
        if alerts.webhook_header_env:
            raise ConfigError("alerts.webhook_header_env is set, and alerts.webhook is not")
        return
    from urllib.parse import urlsplit

    from vllm_launchers.addresses import is_loopback

    try:
        url = urlsplit(alerts.webhook)
        host, _ = url.hostname, url.port
    except ValueError:
        host = None
    # The URL may be a secret itself: it is not repeated.
    if host is None or url.scheme not in ("http", "https") or not alerts.webhook.isprintable() or " " in alerts.webhook:
        raise ConfigError('alerts.webhook: expected a URL such as "https://example.org/hook"')
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", alerts.webhook_header):
        raise ConfigError(f"alerts.webhook_header: '{alerts.webhook_header[:40]}' is no name of an HTTP header")
    if alerts.webhook_header_env and url.scheme == "http" and not is_loopback(host):
        raise ConfigError("alerts.webhook: a secret header needs https, or everybody on the way can read it")
