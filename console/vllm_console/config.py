"""Settings: what an administrator sets for everybody, then a person's own ``config.toml``; checked key by key.

What the administrator's file sets binds: a person's own file, ``--config`` and the environment add to it and loosen
nothing of it. Its path is fixed, since ``XDG_CONFIG_DIRS`` is each person's own to set. It is a guard-rail, no wall:
whoever may run programs can run vLLM without this one.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from vllm_launchers.machine.gpu.sharing import Share

ADMIN_CONFIG = Path("/etc/vllm-console/config.toml")
"""What an administrator sets for everybody on this machine."""

ADMIN_UID = 0
"""Whose file and folder that must be, for it to count."""

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
    findings are told; ``board`` is the folder of the board that people of this machine share.
    """

    vllm: tuple[str, ...] = ()
    refresh_seconds: float = 1.0
    read_only: bool = False
    ascii: bool = False
    keys: Mapping[str, str] = {}
    shares: Mapping[str, str | float] = {}
    reserve: Mapping[str, str | float] = {}
    alerts: Alerts = Alerts()
    board: str = ""


class Settings(Config, frozen=True):
    """What holds: the person's ``shares`` and ``reserve``, and all else as both files together say.

    ``binding`` is the administrator's own file, whose shares and reserves hold besides; ``sources`` has for each key
    that is set the file that it comes from; ``notices`` what a person should know of these files, one sentence each.
    """

    binding: Config = Config()
    sources: Mapping[str, str] = {}
    notices: tuple[str, ...] = ()

    @property
    def read_only_by(self) -> str:
        """What makes it read-only, in a few words; empty where no file does."""
        return f"read_only = true in {self.sources['read_only']}" if self.read_only else ""


def gpu_shares(config: Config) -> tuple[Share, ...]:
    """The most that this person's servers may hold of each GPU.

    Raises:
        ConfigError: a key is no index of a GPU, or a value is no share.
    """
    return _parts("shares", config.shares) + _parts("shares", _bound(config).shares)


def gpu_reserves(config: Config) -> tuple[Share, ...]:
    """What must stay free of each GPU for other tenants.

    Raises:
        ConfigError: a key is no index of a GPU, or a value is no part of one.
    """
    return _parts("reserve", config.reserve) + _parts("reserve", _bound(config).reserve)


def _bound(config: Config) -> Config:
    return config.binding if isinstance(config, Settings) else Config()


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


def read_settings(path: Path | None = None) -> Settings:
    """What holds for this person: the administrator's file, then the person's own or the one that ``path`` names.

    Raises:
        ConfigError: one of them cannot be used. What binds and cannot be read is not passed over.
    """
    path = path or config_folder() / "config.toml"
    notices: list[str] = []
    bound, own = _administrators(notices), _document(path)
    binding = _config(ADMIN_CONFIG, bound)
    person = _config(path, own)
    if binding.board and person.board and Path(person.board) != Path(binding.board):
        notices.append(f"{path}: its board is not used: {ADMIN_CONFIG} names {binding.board} for everybody")
    both = {**bound, **own}
    for name in ("keys", "alerts"):
        if name in bound and name in own:
            both[name] = {**bound[name], **own[name]}
    both["vllm"] = list(dict.fromkeys([*person.vllm, *binding.vllm]))
    both["read_only"] = binding.read_only or person.read_only
    both["board"] = binding.board or person.board
    for name in ("shares", "reserve"):
        both[name] = own.get(name, {})
    sources = {key: str(path) for key in own} | {key: str(ADMIN_CONFIG) for key in bound if key not in own}
    if binding.read_only:
        sources["read_only"] = str(ADMIN_CONFIG)
    if binding.board:
        sources["board"] = str(ADMIN_CONFIG)
    merged = _config(path, both)
    fields = {field.name: getattr(merged, field.name) for field in msgspec.structs.fields(Config)}
    return Settings(**fields, binding=binding, sources=sources, notices=tuple(notices))


def _administrators(notices: list[str]) -> dict[str, Any]:
    """The administrator's document; one that others could have written is left aside, with a sentence.

    Raises:
        ConfigError: it is there and cannot be read.
    """
    try:
        file = os.open(ADMIN_CONFIG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(
            f"{ADMIN_CONFIG}: what holds for everybody cannot be read: {os.strerror(error.errno or 0)}. "
            "Ask who looks after this machine to make it readable"
        ) from error
    with os.fdopen(file, "rb") as opened:
        for place, status in ((ADMIN_CONFIG, os.fstat(file)), (ADMIN_CONFIG.parent, ADMIN_CONFIG.parent.stat())):
            if fault := _untrusted(status):
                notices.append(f"{ADMIN_CONFIG} is left aside: {place} {fault}")
                return {}
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ConfigError(f"{ADMIN_CONFIG}: is no file")
        return _parsed(ADMIN_CONFIG, opened.read(MAX_BYTES + 1))


def _untrusted(status: os.stat_result) -> str:
    """Why what stands there need not be an administrator's word; empty where it is."""
    if status.st_uid != ADMIN_UID:
        return f"belongs to uid {status.st_uid}, not to root"
    return "can be written by others than root" if status.st_mode & 0o022 else ""


def _document(path: Path) -> dict[str, Any]:
    """A TOML file as it stands; a missing one is empty."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from error
    return _parsed(path, data)


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES // 1024} KiB; that is no config file")
    import tomllib  # most people have no config file, and every command would pay for it

    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:  # a number of ten thousand digits is a ValueError
        raise ConfigError(f"{path}: is not TOML: {error}") from error


def _config(path: Path, document: Mapping[str, Any]) -> Config:
    """A file's document with every key checked.

    Raises:
        ConfigError: a key is unknown, of the wrong type, or says what makes no sense; the text names ``path``.
    """
    _refuse_unknown(path, document, Config)
    if isinstance(alerts := document.get("alerts"), dict):
        _refuse_unknown(path, alerts, Alerts, "alerts.")
    try:
        config = msgspec.convert(document, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not 0.1 <= config.refresh_seconds <= 60:
        raise ConfigError(f"{path}: refresh_seconds must lie between 0.1 and 60, not {config.refresh_seconds}")
    if config.board and not (config.board.startswith("/") and config.board.isprintable()):
        raise ConfigError(f'{path}: board: expected the whole path of a folder, such as "/var/lib/vllm-console/board"')
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
            raise ConfigError(f"{path}: unknown key '{within}{key[:80]}'{hint}")


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
