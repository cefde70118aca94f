"""Secrets never show."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable

import pytest

from vllm_launchers.plan.command_line import command_line, inherited_secrets, split_secrets
from vllm_launchers.plan.model import Plan
from vllm_launchers.secrets import HIDDEN, is_secret_flag, is_secret_name, redact, redact_argv, redact_environment

KEY = "hunter2-hunter2"


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "VLLM_API_KEY", "OPENAI_APIKEY", "MY_PASSWORD", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN"),
        *("hf_token", "PGPASSWORD", "PGPASS", "DB_PASS", "MYSQL_PWD", "REDIS_AUTH", "TS_AUTHKEY", "GITHUB_PAT"),
        *("DOCKER_AUTH_CONFIG", "JWT", "BEARER", "CREDS", "COOKIE"),
    ],
)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)
    assert KEY not in redact(f"env {name}={KEY} vllm serve m")


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "KEYBOARD", "MONKEY", "VLLM_CPU_KVCACHE_SPACE", "PATH"),
        *("PWD", "OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY", "PGPASSFILE", "MYSQL_PASSWORD_FILE", "BYPASS", "COMPAT"),
    ],
)
def test_other_names(name: str) -> None:
    assert not is_secret_name(name)


def test_credentials_in_a_flag() -> None:
    """But ``--allow-credentials``, a switch of vLLM, is none."""
    assert is_secret_flag("model-loader-extra-config.credentials")
    assert KEY not in redact(f'--model-loader-extra-config {{"credentials": "{KEY}"}}')
    assert not is_secret_flag("allow-credentials")
    for text in ("--allow-credentials --port 1", "allow_credentials=True", "no credentials: file not found"):
        assert redact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        f"vllm serve m --api-key {KEY} --port 1",
        f"vllm serve m --api-key={KEY}",
        f"vllm serve m --api_key '{KEY}'",
        f"['vllm', 'serve', '--hf-token', '{KEY}']",
        f"non-default args: {{'api_key': ['{KEY}'], 'port': 1}}",
        f"EngineArgs(hf_token='{KEY}')",
        f"HF_TOKEN={KEY} vllm serve m",
        f"Authorization: Bearer {KEY}",
        f'{{"authorization": "{KEY}"}}',
    ],
)
def test_redact_hides_only_the_value(text: str) -> None:
    shown = redact(text)
    assert KEY not in shown
    assert "•••" in shown
    assert shown.replace("•••", KEY) == text


@pytest.mark.parametrize(
    "text", ["hf_abcdefghijklmnopqrstu", "sk-abcdefghijklmnop1234", "NOTE=hf_abcdefghijklmnopqrstu"]
)
def test_possible_keys_are_redacted(text: str) -> None:
    assert "abcdef" not in redact(f"it is {text}, he said")


@pytest.mark.parametrize(
    "text",
    [
        "INFO 11-20 11:53:22 [core.py:402] Avg prompt throughput: 12.3 tokens/s, GPU KV cache usage: 3.0%",
        "TOKENIZERS_PARALLELISM=false",
        "the key value cache; --max-num-batched-tokens 8192 token budget",
        "loading hf_config",
    ],
)
def test_other_text_is_unchanged(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pa@ss@proxy:80/x", "http://•••@proxy:80/x"),
        ("https_proxy=http://user:p@@s@proxy:80 vllm", "https_proxy=http://•••@proxy:80 vllm"),
        ("['http://u:a@b@h/p@q', 'http://c:d@e@i']", "['http://•••@h/p@q', 'http://•••@i']"),
        (f"http://u:{'x' * 2000}@h", "http://•••@h"),
        ("http://h/a@b?c=d@e", "http://h/a@b?c=d@e"),
        ("see http://h:80, or write to a@b.org", "see http://h:80, or write to a@b.org"),
    ],
)
def test_password_in_a_url_is_redacted_completely(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


def test_secret_after_many_names_is_redacted() -> None:
    shown = redact("A=" * 3000 + "hf_abcdefghijklmnopqrstu")
    assert shown == "A=" * 3000 + "•••"
    assert redact("ARGS='--api-key swordfish'") == "ARGS='--api-key •••'"


@pytest.mark.parametrize(
    "pattern",
    ["x", "X", "key", "api_key: ", "hf_ ", "A=", "-", "TOKEN=", "api_key:{}", "{}hf_", "://x", "://@"],
)
def test_time_is_linear_in_the_line_length(pattern: str) -> None:
    def seconds(length: int) -> float:
        text = pattern.replace("{}", " " * length) if "{}" in pattern else pattern * (length // len(pattern))
        times = []
        for _ in range(3):
            began = time.process_time()
            redact(text)
            times.append(time.process_time() - began)
        return min(times)

    small, large = seconds(4_000), seconds(64_000)  # 16 times as long: 256 times the time if it were quadratic
    assert large < 80 * max(small, 0.0002)


def test_known_values_are_redacted_anywhere() -> None:
    assert redact("it said swordfish twice: swordfish", ["swordfish", "it"]) == "it said ••• twice: •••"


def test_argv_and_environment() -> None:
    assert redact_argv(["vllm", "--api-key", "a", "b", "--port", "1"]) == (
        "vllm",
        "--api-key",
        "•••",
        "•••",
        "--port",
        "1",
    )
    assert redact_argv(["--hf_token=abc"]) == ("--hf_token=•••",)
    assert redact_environment({"HF_TOKEN": "x", "A": "1"}) == {"HF_TOKEN": "•••", "A": "1"}


def test_split_and_inherit() -> None:
    plain, secret = split_secrets({"A": "1", "HF_TOKEN": "x"})
    assert (plain, secret) == ({"A": "1"}, {"HF_TOKEN": "x"})
    assert inherited_secrets({"HF_TOKEN": "x", "VLLM_API_KEY": "", "GITHUB_TOKEN": "y"}) == {"HF_TOKEN": "x"}


def test_command_line_can_be_copied(plan: Callable[..., Plan]) -> None:
    made = plan(secrets=("VLLM_API_KEY",), environment={"NOTE": "two words"}, set={"chat-template": "a b.jinja"})
    line = command_line(made)
    assert line.startswith("NOTE='two words' VLLM_API_KEY=\"$VLLM_API_KEY\" /opt/venv/bin/vllm serve ")
    assert shlex.split(line)[2:] == list(made.argv)


def test_known_secrets_that_overlap_are_redacted_together() -> None:
    assert redact("x abcdefghij y", ["abcdefg", "defghij"]) == f"x {HIDDEN} y"
    assert redact("ababababx abab", ["abab"]) == f"{HIDDEN}x {HIDDEN}"
    assert redact("abcdefg abc", ["abc", "abcdefg"]) == f"{HIDDEN} abc", "one of three characters stays"
