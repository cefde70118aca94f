"""A person's settings: ``config.toml`` in the config folder, checked key by key."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

MAX_BYTES = 256 * 1024
"""A config file larger than this is not one."""


class ConfigError(Exception):
    """A config file that cannot be used; the text is one sentence that names file, key and what was expected."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``config.toml``. ``vllm`` lists further installations; ``keys`` maps an action's id to another key."""

    vllm: tuple[str, ...] = ()
    refresh_seconds: float = 1.0
    read_only: bool = False
    ascii: bool = False
    keys: Mapping[str, str] = {}


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
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Config()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    known = [field.name for field in msgspec.structs.fields(Config)]
    for key in document:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{path}: unknown key '{key}'{hint}")
    try:
        config = msgspec.convert(document, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not 0.1 <= config.refresh_seconds <= 60:
        raise ConfigError(f"{path}: refresh_seconds must lie between 0.1 and 60, not {config.refresh_seconds}")
    return config
