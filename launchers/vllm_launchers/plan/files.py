"""Flags that name files and folders that vLLM reads at startup. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.plan.budget.memory_flags import draft_model
from vllm_launchers.vllm.flags.changes import Flags, json_flag, json_object
from vllm_launchers.vllm.flags.several_words import several_words
from vllm_launchers.vllm.flags.speculation import SPECULATION
from vllm_launchers.vllm.release_defaults import Release, checked

_TEMPLATE, _ADAPTERS = "chat-template", "lora-modules"
_LITERAL = "{}\n"
"""A chat template with one of these characters is the template text itself, unless a file of that name exists
(``load_chat_template``)."""
_TOKENIZER, _LOGGING = "tokenizer", "log-config-file"
_FORMAT = "config-format"
_CONFIGS = {"hf": "config.json", "mistral": "params.json"}
"""The configuration file of a model, by format."""
_AUTHORITIES, _CERTIFICATES = "ssl-ca-certs", ("ssl-keyfile", "ssl-certfile")


def ignored_file(name: str, flags: Flags, release: Release | None) -> bool:
    """Whether a release may ignore the file of this flag.

    Those checked look up the tokenizer's revision even if they don't load it, and need the logging configuration file.
    """
    unread = name == _LOGGING or (name == _TOKENIZER and flags.get("skip-tokenizer-init") is True)
    return unread and not checked(release)


def named_files(flags: Flags, model: str) -> tuple[tuple[str, str], ...]:
    """Absolute paths that must exist, each with the flag that names it. ``model`` is a name or a folder."""
    names = [_TEMPLATE, "hf-config-path", _TOKENIZER, _LOGGING, *_CERTIFICATES]
    if any(name in flags for name in _CERTIFICATES):
        names.append(_AUTHORITIES)  # unused without it
    given = [(name, str(flags[name])) for name in names if name in flags]
    given.append(("logging-config", str(json_flag(flags, "logging-config").get("pylogging_config_file"))))
    if (config := _CONFIGS.get(str(flags.get(_FORMAT)))) is not None:
        given.append((_FORMAT, f"{flags.get('hf-config-path', model)}/{config}"))
    given += [(_ADAPTERS, path) for path in adapter_folders(flags)]
    given.append(("spec-model" if "spec-model" in flags else SPECULATION, draft_model(flags)))
    return tuple((name, path) for name, path in given if path.startswith("/") and not _is_template(name, path))


def _is_template(name: str, path: str) -> bool:
    return name == _TEMPLATE and any(character in path for character in _LITERAL)


def adapter_folders(flags: Flags) -> Iterator[str]:
    """The folders of ``--lora-modules``: each word is ``NAME=PATH`` or a JSON object."""
    value = flags.get(_ADAPTERS)
    if not isinstance(value, str):
        return
    for word in several_words(_ADAPTERS, value) or (value,):
        document = json_object(word)
        path = document.get("path") if document else word.partition("=")[2]
        if isinstance(path, str) and path.startswith("/"):
            yield path
