"""A keeper's environment: folder, environment variables, secrets and timeouts.

Secrets come from a console or the environment, and are never written to disk.

A keeper that adopts a server gets the environment of the launch, not that of the console that happened to start it: a
restart must not run with a different ``CUDA_VISIBLE_DEVICES``, library path or token. A record contains only the values
of variables that are known to affect how a server runs, and never one that looks like a secret. Any other variable
comes from the new keeper's own environment, and only if the launch had one of that name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from vllm_launchers.keeper.errors import SecretMissingError
from vllm_launchers.keeper.records import Inherited, LaunchSpec, ServerRecord
from vllm_launchers.secrets import holds_secret, is_secret_name
from vllm_launchers.values import Value

_NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP"),
        *("LIBRARY_PATH", "CPATH", "CC", "CXX", "CONDA_PREFIX", "VIRTUAL_ENV", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY"),
        *("ALL_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "MAX_JOBS"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"),
    }
)
_FAMILIES = (
    *("LC_", "LD_", "PYTHON", "VLLM", "SIMULATED_", "CUDA", "NVIDIA_", "NCCL_", "HIP_", "HSA_", "ROCM_", "ROCR_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "SAFETENSORS_", "TOKENIZERS_", "TORCH", "PYTORCH_", "TRITON_"),
    *("FLASHINFER_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "NUMBA_", "RAY_", "GLOO_", "UCX_", "OUTLINES_"),
    *("MALLOC_", "XLA_", "TVM_", "DG_", "DEEPGEMM_"),
)
"""Prefixes of variables that affect how vLLM, PyTorch, CUDA and their libraries run."""
_LONGEST_VALUE = 1 << 15
"""Maximum characters; longer values would make every write of a record slow."""


class StopTimeouts(Value):
    """Seconds to wait after each step of a stop before the next."""

    interrupt: float = 8.0
    """After each of two SIGINTs to a starting server."""
    terminate: float = 10.0
    """After SIGTERM to a serving server, plus its drain time."""
    rest: float = 5.0
    """After SIGTERM to every process that is left."""
    kill: float = 10.0
    """After SIGKILL, before a process is reported as stuck."""


class Tuning(Value):
    """A keeper's intervals and timeouts in seconds. Consoles use the defaults; tests shorten them."""

    stop_timeouts: StopTimeouts = StopTimeouts()
    health_check_starting: float = 0.3
    health_check_ready: float = 2.0
    failed_health_checks: int = 3
    """Failed health checks in a row before a ready server is called unresponsive."""
    steady: float = 600.0
    """After this long in the ready state, the count of automatic restarts is reset."""
    prepare: float = 300.0
    """Limit for preparing a restart: imports take 10 to 20 s on a GPU host, minutes from a cold network file system."""


class KeeperContext(Value):
    """What a keeper was started with and passes on to its server."""

    folder: Path
    environment: Mapping[str, str]
    umask: int
    tuning: Tuning


def known_secrets(spec: LaunchSpec, given: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The spec's secrets that have a value, from ``given`` or else from the environment."""
    found = {name: given.get(name) or environment.get(name, "") for name in spec.secret_names}
    return {name: value for name, value in found.items() if value}


def complete_secrets(spec: LaunchSpec, given: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """All secrets that a spec names. Raises `SecretMissingError` naming those without a value."""
    found = known_secrets(spec, given, environment)
    if missing := [name for name in spec.secret_names if name not in found]:
        raise SecretMissingError(f"secret {', '.join(missing)} missing: set it in the environment and try again")
    return found


def secrets_of_process(record: ServerRecord) -> dict[str, str]:
    """The secrets that a running server was started with, as far as its process still shows them.

    A keeper that adopts a server may have no other source. vLLM's process titles can overwrite the environment.
    """
    names = set(record.current.spec.secret_names)
    if record.server is None or not names:
        return {}
    try:
        environment = Path(f"/proc/{record.server.pid}/environ").read_bytes()
    except OSError:
        return {}
    entries = (entry.partition("=") for entry in os.fsdecode(environment).split("\0"))
    return {name: value for name, _, value in entries if name in names and value}


def inherited_from(environment: Mapping[str, str], umask: int) -> Inherited:
    """The part of an environment that a record may contain."""
    values = {name: value for name, value in environment.items() if _may_be_recorded(name, value)}
    others = sorted(name for name in environment.keys() - values.keys() if _is_text(name))
    return Inherited(values, tuple(others), umask)


def restored_environment(
    inherited: Inherited, secrets: Iterable[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """The recorded launch environment; variables missing there, and the named secrets, come from ``environment``."""
    missing = {*inherited.others, *secrets}
    return {**{name: value for name, value in environment.items() if name in missing}, **inherited.values}


def _may_be_recorded(name: str, value: str) -> bool:
    known = name.upper() in _NAMES or name.startswith(_FAMILIES)
    fits = _is_text(value) and len(value) <= _LONGEST_VALUE
    return known and fits and not is_secret_name(name) and not holds_secret(f"{name}={value}")


def _is_text(value: str) -> bool:
    """Whether it is valid UTF-8: an environment may contain any bytes, but a record contains text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
