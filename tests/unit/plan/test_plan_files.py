"""Files named by a launch's flags, which vLLM must find."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_launchers.plan.files import ignored_file, named_files


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"chat-template": "/t.jinja"}, ["chat-template"]),
        ({"chat-template": "/{{ messages }}"}, []),
        ({"chat-template": "tool_chat_template.jinja"}, []),
        ({"hf-config-path": "/model", "tokenizer": "/model"}, ["hf-config-path", "tokenizer"]),
        ({"tokenizer": "org/model"}, []),
        ({"ssl-keyfile": "/key", "ssl-ca-certs": "/all"}, ["ssl-keyfile", "ssl-ca-certs"]),
        ({"ssl-ca-certs": "/all"}, []),
        ({"log-config-file": "/log.json"}, ["log-config-file"]),
    ],
)
def test_files_that_must_exist(flags: dict[str, Any], names: list[str]) -> None:
    assert named_files(flags, "org/model") == tuple((name, flags[name]) for name in names)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"lora-modules": "sql=/adapters/sql"}, [("lora-modules", "/adapters/sql")]),
        (
            {"lora-modules": '["a=/a", {"name": "b", "path": "/b"}, "c=org/c"]'},
            [("lora-modules", "/a"), ("lora-modules", "/b")],
        ),
        ({"spec-model": "/draft", "spec-tokens": 1}, [("spec-model", "/draft")]),
        ({"speculative-config": '{"model": "/draft"}'}, [("speculative-config", "/draft")]),
        ({"speculative-config.model": "/draft"}, [("speculative-config", "/draft")]),
        ({"spec-method": "ngram", "spec-model": "/unread"}, []),
        ({"spec-model": "org/draft"}, []),
        ({"logging-config.pylogging_config_file": "/log.json"}, [("logging-config", "/log.json")]),
        ({"logging-config": '{"log_level": "DEBUG"}'}, []),
        ({"config-format": "mistral"}, [("config-format", "/model/params.json")]),
        ({"config-format": "hf"}, [("config-format", "/model/config.json")]),
        ({"config-format": "auto"}, []),
        (
            {"config-format": "hf", "hf-config-path": "/config"},
            [("hf-config-path", "/config"), ("config-format", "/config/config.json")],
        ),
        ({"config-format": "hf", "hf-config-path": "org/config"}, []),
    ],
)
def test_files_that_several_words_or_keys_name_must_exist(flags: dict[str, Any], named: list[tuple[str, str]]) -> None:
    assert list(named_files(flags, "/model")) == named


def test_files_that_earlier_releases_may_do_without() -> None:
    assert ignored_file("log-config-file", {"log-config-file": "/log.json"}, (0, 31, 0))
    assert not ignored_file("log-config-file", {"log-config-file": "/log.json"}, (0, 32, 0))
    unread = {"tokenizer": "/model", "skip-tokenizer-init": True}
    assert ignored_file("tokenizer", unread, (0, 31, 0))
    assert not ignored_file("tokenizer", unread, (0, 32, 0))
    assert not ignored_file("tokenizer", {"tokenizer": "/model"}, (0, 31, 0))
    assert not ignored_file("chat-template", {**unread, "chat-template": "/t.jinja"}, (0, 31, 0))
