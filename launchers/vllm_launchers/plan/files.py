"""Flags that name files and folders which vLLM reads when it starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.release_defaults import Release

_TEMPLATE = "chat-template"
_LITERAL = "{}\n"
"""A template with one of these is the text itself, unless a file has that name (``load_chat_template``)."""
_TOKENIZER = "tokenizer"
_TOKENIZER_CHECKED: Release = (0, 32, 0)
"""From here on vLLM looks for the tokenizer's revision even if it does not load it; earlier releases were not checked.
"""
_AUTHORITIES, _CERTIFICATES = "ssl-ca-certs", ("ssl-keyfile", "ssl-certfile")


def ignored_file(name: str, flags: Flags, release: Release | None) -> bool:
    """Whether a release may do without the file of this flag."""
    unread = name == _TOKENIZER and flags.get("skip-tokenizer-init") is True
    return unread and (release is None or release < _TOKENIZER_CHECKED)


def named_files(flags: Flags) -> Mapping[str, str]:
    """The absolute paths that must exist, by the flags that name them.

    Not ``log-config-file``: vLLM goes on without it.
    """
    names = [_TEMPLATE, "hf-config-path", _TOKENIZER, *_CERTIFICATES]
    if any(name in flags for name in _CERTIFICATES):
        names.append(_AUTHORITIES)  # otherwise unused
    given = {name: str(flags[name]) for name in names if name in flags}
    return {
        name: path
        for name, path in given.items()
        if path.startswith("/") and not (name == _TEMPLATE and any(character in path for character in _LITERAL))
    }
