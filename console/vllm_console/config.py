"""A person's settings: ``config.toml`` in the config folder, checked key by key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vllm_launchers.machine.gpu.sharing import Share

MAX_BYTES = 256 * 1024
"""A config file larger than this is not one."""

MOST_DIGITS = 4
"""No index of a GPU is longer."""


class ConfigError(Exception):
    """A config file that cannot be used; the text is one sentence that names file, key and what was expected."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``config.toml``. ``vllm`` lists further installations; ``keys`` maps an action's id to another key;
    ``shares`` a GPU's index to the most that this person's servers may hold of it (``"24 GiB"``, ``"50 %"``).
    """

    vllm: tuple[str, ...] = ()
    refresh_seconds: float = 1.0
    read_only: bool = False
    ascii: bool = False
    keys: Mapping[str, str] = {}
    shares: Mapping[str, str | float] = {}


def gpu_shares(config: Config) -> tuple[Share, ...]:
    """The most that this person's servers may hold of each GPU.

    Raises:
        ConfigError: a key is no index of a GPU, or a value is no share.
    """
    if not config.shares:
        return ()
    from vllm_launchers.machine.gpu.errors import HostError
    from vllm_launchers.machine.gpu.sharing import parse_share

    for key in config.shares:
        if not (key.isascii() and key.isdigit() and len(key) <= MOST_DIGITS):
            raise ConfigError(f"shares: '{key[:40]}' is no GPU; expected its index, such as 0 = \"24 GiB\"")
    try:
        return tuple(parse_share(int(key), value) for key, value in config.shares.items())
    except HostError as error:
        raise ConfigError(f"shares: {error}") from error


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
    known = [field.name for field in msgspec.structs.fields(Config)]
    for key in document:
        if key not in known:
            import difflib

            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{path}: unknown key '{key}'{hint}")
    try:
        config = msgspec.convert(document, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not 0.1 <= config.refresh_seconds <= 60:
        raise ConfigError(f"{path}: refresh_seconds must lie between 0.1 and 60, not {config.refresh_seconds}")
    try:
        gpu_shares(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return config
