"""Settings: the administrator's for all users, then the user's own ``config.toml``; each key is validated.

The administrator's settings are binding: the user's own file, ``--config`` and the environment can add to them but not
loosen them. The path is fixed, because every user can set ``XDG_CONFIG_DIRS``. This is a guard rail, not a security
boundary: whoever may run programs can run vLLM without this one.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from vllm_console.text import plain
from vllm_launchers.errors import UsageError
from vllm_launchers.private import open_regular, user_folder
from vllm_launchers.typed_decoding import convert

if TYPE_CHECKING:
    from vllm_launchers.host.gpu.sharing import GpuShare

ADMIN_CONFIG = Path("/etc/vllm-console/config.toml")
"""The administrator's settings for all users of this machine."""

ADMIN_UID = 0
"""Required owner of that file and its folder."""

MAX_BYTES = 256 * 1024
"""A larger file is not a config file."""

MOST_DIGITS = 4
"""Maximum number of digits of a GPU index."""


MOST_PER_KWH = 1_000_000
LONGEST_CURRENCY = 8
"""Maximum price, and maximum length of its currency's name."""


class ConfigError(UsageError):
    """A config file that cannot be used. The message is one sentence with the file, the key and what was expected."""


class Alerts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[alerts]``: where findings are sent. `findings.log` always has all of them."""

    severity: Annotated[
        Literal["critical", "warning", "note"],
        Meta(description="Minimum severity of findings that alert the terminal or the webhook."),
    ] = "warning"
    terminal: Annotated[
        tuple[Literal["bell", "osc9", "osc777"], ...],
        Meta(description="How the terminal is alerted, at most every 10 s: the bell, or a desktop notification."),
    ] = ()
    webhook: Annotated[str, Meta(description="A URL that receives each finding as JSON when it begins and ends.")] = ""
    webhook_header: Annotated[str, Meta(description="The HTTP header that carries the webhook's secret.")] = (
        "Authorization"
    )
    webhook_header_env: Annotated[
        str,
        Meta(description="The environment variable that holds the header's value. The secret is never in this file."),
    ] = ""


class EnergyPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[energy]``: the price of energy. A price of 0 means none."""

    price_per_kwh: Annotated[
        float, Meta(description="Price per kWh; if set, energy per token is also shown as cost per million tokens.")
    ] = 0.0
    currency: Annotated[str, Meta(description="The currency of that price, as displayed.")] = "EUR"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``config.toml``, key by key. The table in ``docs/settings.md`` is generated from the descriptions."""

    vllm: Annotated[
        tuple[str, ...], Meta(description="More vLLM installations: paths of executables or virtual environments.")
    ] = ()
    models: Annotated[
        tuple[str, ...],
        Meta(
            description="Folders to search for models: a model folder, or a parent of model folders (including "
            "`org/name`)."
        ),
    ] = ()
    refresh_seconds: Annotated[float, Meta(description="How often the console refreshes, 0.1 to 60 seconds.")] = 1.0
    read_only: Annotated[bool, Meta(description="Refuse every command and key that changes something.")] = False
    ascii: Annotated[bool, Meta(description="Draw the console with ASCII characters only.")] = False
    layout: Annotated[
        Literal["auto", "overview", "focus", "wide", "tall"],
        Meta(description="Initial layout of the panes; `auto` is the best for the terminal's size."),
    ] = "auto"
    theme: Annotated[
        Literal["terminal", "dark", "light", "high-contrast", "nord", "gruvbox"],
        Meta(description="Colors of the console; `terminal`: the terminal's own."),
    ] = "terminal"
    columns: Annotated[
        tuple[
            Literal[
                "name", "model", "preset", "owner", "state", "gpu", "port", "kv", "run", "wait", "preempt", "ttft",
                "itl", "tokens", "requests", "hit", "engine", "host",
            ],
            ...,
        ],
        Meta(description="Columns of the server table, in this order, as many as fit; by default those that fit best."),
    ] = ()  # fmt: skip
    keymap: Annotated[
        Literal["default", "vim", "arrows"], Meta(description="A preset of keys; `keys` overrides individual ones.")
    ] = "default"
    keys: Annotated[Mapping[str, str], Meta(description="Your own keys: an action's id → a key.")] = {}
    shares: Annotated[
        Mapping[str, str | float],
        Meta(description='Maximum memory of a GPU that your servers may use: GPU index → `"24 GiB"` or `"50%"`.'),
    ] = {}
    reserve: Annotated[
        Mapping[str, str | float],
        Meta(description="The memory of a GPU to keep free for others; a finding says when less is free."),
    ] = {}
    alerts: Annotated[Alerts, Meta(description="Where findings are sent; see the keys `alerts.…`.")] = Alerts()
    energy: Annotated[EnergyPrice, Meta(description="What energy costs; see the keys `energy.…`.")] = EnergyPrice()
    board: Annotated[str, Meta(description="The folder of the GPU board that the users of this machine share.")] = ""
    warm_up: Annotated[bool, Meta(description="Send a server one request before it counts as ready.")] = True
    probe: Annotated[
        Literal["auto", "on", "off"],
        Meta(description="Record each request and engine step of a server; `auto`: with the tested releases of vLLM."),
    ] = "auto"
    prepare_restarts: Annotated[
        bool, Meta(description="Load vLLM and check the flags of a restart while the server still serves.")
    ] = True
    prepare_launches: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="Prepare a launch while its plan is read, with vLLM's verdict; `auto`: not on a shared machine."
        ),
    ] = "auto"
    rollback: Annotated[
        bool, Meta(description="Revert to the previous flags if a restarted server fails before it is ready.")
    ] = True


_TABLES: Mapping[str, type[msgspec.Struct]] = {"alerts": Alerts, "energy": EnergyPrice}
"""The keys that are tables with their own keys."""


class Settings(Config, frozen=True):
    """The effective settings: the user's ``shares`` and ``reserve``, and both files merged for everything else.

    ``binding`` is the administrator's own file, whose shares and reserves also apply. ``sources`` has the file that
    each set key comes from; ``notices`` tell the user about these files, ``mistakes`` which settings were ignored
    because they are unusable, one sentence each.
    """

    binding: Config = Config()
    sources: Mapping[str, str] = {}
    notices: tuple[str, ...] = ()
    mistakes: tuple[str, ...] = ()

    @property
    def read_only_by(self) -> str:
        """The setting that makes it read-only, in a few words; empty if there is none."""
        return f"read_only = true in {self.sources['read_only']}" if self.read_only else ""

    @property
    def prepares_launches(self) -> bool:
        """Whether vLLM checks launches while they are planned: by default not where others need the memory."""
        shared = bool(self.board or self.shares or self.reserve or self.binding != Config())
        return self.prepare_launches == "on" or (self.prepare_launches == "auto" and not shared)


def gpu_shares(config: Config) -> tuple[GpuShare, ...]:
    """The maximum of each GPU's memory that this user's servers may hold.

    Raises:
        ConfigError: a key is not a GPU index, or a value is not a share.
    """
    return _parts("shares", config.shares) + _parts("shares", _bound(config).shares)


def gpu_reserves(config: Config) -> tuple[GpuShare, ...]:
    """The memory of each GPU that must stay free for other tenants.

    Raises:
        ConfigError: a key is not a GPU index, or a value is not a share.
    """
    return _parts("reserve", config.reserve) + _parts("reserve", _bound(config).reserve)


def _bound(config: Config) -> Config:
    return config.binding if isinstance(config, Settings) else Config()


def _parts(name: str, parts: Mapping[str, str | float]) -> tuple[GpuShare, ...]:
    if not parts:
        return ()
    from vllm_launchers.host.gpu.host import HostError
    from vllm_launchers.host.gpu.sharing import parse_share

    for key in parts:
        if not (key.isascii() and key.isdigit() and len(key) <= MOST_DIGITS):
            raise ConfigError(f"{name}: '{key[:40]}' is not a GPU index; expected e.g. 0 = \"24 GiB\"")
    try:
        return tuple(parse_share(int(key), value) for key, value in parts.items())
    except HostError as error:
        raise ConfigError(f"{name}: {error}") from error


def config_folder() -> Path:
    """``$XDG_CONFIG_HOME/vllm-console``, by default ``~/.config/vllm-console``."""
    return user_folder("XDG_CONFIG_HOME", ".config")


def read_settings(path: Path | None = None, *, forgiving: bool = False) -> Settings:
    """The effective settings: the administrator's file, then the user's own or the one at ``path``.

    If ``forgiving``, unusable settings in the user's file are ignored.

    Raises:
        ConfigError: one of the files cannot be used. An unreadable administrator's file is never ignored.
    """
    named, path = path is not None, path or config_folder() / "config.toml"
    notices: list[str] = []
    mistakes: list[str] | None = [] if forgiving else None
    bound, own = _administrators(notices), _document(path, named, mistakes)
    if mistakes is not None:
        own = _usable(path, own, mistakes)
    left_out = tuple(mistakes or ())
    if not bound and not own:
        return Settings(notices=tuple(notices), mistakes=left_out)
    binding = _config(ADMIN_CONFIG, bound)
    person = _config(path, own)
    if binding.board and person.board and Path(person.board) != Path(binding.board):
        notices.append(f"{path}: its board is ignored: {ADMIN_CONFIG} sets {binding.board} for everybody")
    both = {**bound, **own}
    for name in ("keys", *_TABLES):
        if name in bound and name in own:
            both[name] = {**bound[name], **own[name]}
    both["vllm"] = list(dict.fromkeys([*person.vllm, *binding.vllm]))
    both["models"] = list(dict.fromkeys([*person.models, *binding.models]))
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
    values = {name: getattr(merged, name) for name in Config.__struct_fields__}
    return Settings(**values, binding=binding, sources=sources, notices=tuple(notices), mistakes=left_out)


def _usable(path: Path, document: dict[str, Any], mistakes: list[str]) -> dict[str, Any]:
    """A document without its unusable keys; ``mistakes`` gets the first error.

    An invalid or misspelled ``read_only`` counts as set unless it is false, because it was meant to prevent changes.
    """
    kept: dict[str, Any] = {}
    fault, meant = "", False
    for key, value in document.items():
        try:
            _config(path, {**kept, key: value})
        except ConfigError as error:
            import difflib

            fault = fault or str(error)
            meant = meant or (value is not False and bool(difflib.get_close_matches(key, ["read_only"])))
        else:
            kept[key] = value
    if fault:
        mistakes.append(fault)
    return {**kept, "read_only": True} if meant else kept


def _administrators(notices: list[str]) -> dict[str, Any]:
    """The administrator's document; ignored, with a notice, if others could have written it.

    Raises:
        ConfigError: it exists but cannot be read.
    """
    try:
        file = os.open(ADMIN_CONFIG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(
            f"{ADMIN_CONFIG}: can't read the administrator's settings: {os.strerror(error.errno or 0)}. "
            "Ask the administrator to make it readable"
        ) from error
    with os.fdopen(file, "rb") as opened:
        for place, status in ((ADMIN_CONFIG, os.fstat(file)), (ADMIN_CONFIG.parent, ADMIN_CONFIG.parent.stat())):
            if fault := _untrusted(status):
                notices.append(f"{ADMIN_CONFIG} is ignored: {place} {fault}")
                return {}
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ConfigError(f"{ADMIN_CONFIG}: is not a file")
        return _parsed(ADMIN_CONFIG, opened.read(MAX_BYTES + 1))


def _untrusted(status: os.stat_result) -> str:
    """Why the file may not be the administrator's; empty if it is."""
    if status.st_uid != ADMIN_UID:
        return f"belongs to uid {status.st_uid}, not to root"
    return "is writable by users other than root" if status.st_mode & 0o022 else ""


def _document(path: Path, named: bool, mistakes: list[str] | None) -> dict[str, Any]:
    """The contents of a TOML file; a missing file is empty, unless the user named it."""
    if path == Path(os.devnull):
        return {}
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        if named:
            raise ConfigError(f"{path}: no such file; pass an existing file to --config, or omit it") from error
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    return _parsed(path, data, mistakes)


def _parsed(path: Path, data: bytes, mistakes: list[str] | None = None) -> dict[str, Any]:
    """Parse a document. With ``mistakes``, invalid TOML yields at most one key, ``read_only``."""
    try:
        return _toml(path, data)
    except ConfigError as error:
        if mistakes is None:
            raise
        mistakes.append(str(error))
        return {"read_only": True} if re.search(rb"(?m)^[ \t]*read_only\b(?![ \t]*=[ \t]*false)", data) else {}


def _toml(path: Path, data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES // 1024} KiB, not a config file")
    import tomllib  # lazy: most users have no config file

    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error
    except (ValueError, RecursionError) as error:  # a number of ten thousand digits is a ValueError
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _config(path: Path, document: Mapping[str, Any]) -> Config:
    """Validate every key of a file's document.

    Raises:
        ConfigError: a key is unknown, of the wrong type, or has an invalid value; the message names ``path``.
    """
    _refuse_unknown(path, document, Config)
    for name, shape in _TABLES.items():
        if isinstance(table := document.get(name), dict):
            _refuse_unknown(path, table, shape, f"{name}.")
    try:
        config = convert(document, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_wrong_type(document, Config) or error}") from error
    if not 0.1 <= config.refresh_seconds <= 60:
        raise ConfigError(f"{path}: refresh_seconds must be between 0.1 and 60, not {config.refresh_seconds}")
    if wrong := next((name for name in config.models if not name.startswith(("/", "~"))), None):
        raise ConfigError(f"{path}: models: '{wrong[:80]}' is not an absolute path, such as \"/data/models\"")
    if config.board and not (config.board.startswith("/") and config.board.isprintable()):
        raise ConfigError(f'{path}: board: expected an absolute path, such as "/var/lib/vllm-console/board"')
    try:
        gpu_shares(config)
        gpu_reserves(config)
        _check_alerts(config.alerts)
        _check_energy(config.energy)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return config


def _refuse_unknown(path: Path, table: Mapping[str, object], shape: type[msgspec.Struct], within: str = "") -> None:
    known = shape.__struct_fields__
    for key in table:
        if key not in known:
            import difflib

            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean '{within}{near[0]}'?" if near else f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{path}: unknown key '{within}{key[:80]}'{hint}")


def _wrong_type(table: Mapping[str, Any], shape: type[msgspec.Struct], within: str = "") -> str:
    """The first key with a value of the wrong type: the key, what was expected, what was found."""
    for field in msgspec.structs.fields(shape):
        if field.name not in table:
            continue
        key, value, kind = f"{within}{field.name}", table[field.name], get_args(field.type)[0]
        if kind in _TABLES.values() and isinstance(value, dict):
            if wrong := _wrong_type(value, kind, f"{field.name}."):
                return wrong
            continue
        if get_origin(kind) is Mapping and isinstance(value, dict):
            _, of = get_args(kind)
            entries = [(f"{key}.{name[:80]}", entry, of) for name, entry in value.items()]
        else:
            entries = [(key, value, kind)]
        for name, entry, taken in entries:
            try:
                convert(entry, taken)
            except msgspec.ValidationError:
                return f"{name}: expected {_expected(taken)}, not {_found(entry, taken)}"
    return ""


def _expected(kind: Any) -> str:
    """The expected type, in TOML terms."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in parts)
    if origin is tuple:
        return f"a list, each entry {_expected(parts[0])}"
    if origin is UnionType:
        return " or ".join(_expected(part) for part in parts)
    words: dict[Any, str] = {str: "a string", float: "a number", bool: "true or false"}
    return words.get(kind, "a table")


def _found(value: object, kind: Any) -> str:
    """The value found instead. Only values of enumerated keys are repeated, because a string may hold a secret."""
    if isinstance(value, str):
        return f'"{plain(value, 40)}"' if get_origin(kind) is Literal else "a string"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, list):
        return "that list" if get_origin(kind) is tuple else "a list"
    return "a table" if isinstance(value, dict) else "a date or time"


def _check_alerts(alerts: Alerts) -> None:
    """Check that the webhook can be called, and that its secret is sent encrypted."""
    if not alerts.webhook:
        if alerts.webhook_header_env:
            raise ConfigError("alerts.webhook_header_env is set but alerts.webhook is not")
        return
    from urllib.parse import urlsplit

    from vllm_launchers.addresses import is_loopback

    try:
        url = urlsplit(alerts.webhook)
        host, _ = url.hostname, url.port
    except ValueError:
        host = None
    # Not repeated, because the URL itself may be a secret.
    if host is None or url.scheme not in ("http", "https") or not alerts.webhook.isprintable() or " " in alerts.webhook:
        raise ConfigError('alerts.webhook: expected a URL such as "https://example.org/hook"')
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", alerts.webhook_header):
        raise ConfigError(f"alerts.webhook_header: '{alerts.webhook_header[:40]}' is not an HTTP header name")
    if alerts.webhook_header_env and url.scheme == "http" and not is_loopback(host):
        raise ConfigError("alerts.webhook: a secret header requires https")


def _check_energy(energy: EnergyPrice) -> None:
    if not 0 <= energy.price_per_kwh <= MOST_PER_KWH:
        raise ConfigError(f"energy.price_per_kwh must be between 0 and {MOST_PER_KWH:,}, not {energy.price_per_kwh:g}")
    if not (0 < len(energy.currency) <= LONGEST_CURRENCY and plain(energy.currency).strip() == energy.currency):
        raise ConfigError(f'energy.currency: expected up to {LONGEST_CURRENCY} characters, such as "EUR"')
