"""The environment of a server's launch, for a keeper that adopts the server from a console in another shell.

A restart under the new keeper is to run as the launch did: not with the ``CUDA_VISIBLE_DEVICES``, the library path or
the tokens of whoever happened to open a console. Values are written down only of variables known to decide how a server
runs, and never one that looks like a secret; any other variable comes from the new keeper's own environment, and only
if the launch had one of that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_launchers.keeper.records import Inherited
from vllm_launchers.secrets import holds_secret, is_secret_name

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
"""Beginnings of names that decide how vLLM, PyTorch, CUDA and their libraries run."""
_LONGEST_VALUE = 1 << 15
"""Characters; with more of them every change of a record would be slow."""


def written_down(environment: Mapping[str, str], umask: int) -> Inherited:
    """What of an environment may be kept in a record."""
    values = {name: value for name, value in environment.items() if _may_be_written(name, value)}
    others = sorted(name for name in environment.keys() - values.keys() if _is_text(name))
    return Inherited(values, tuple(others), umask)


def brought_back(inherited: Inherited, secrets: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the launch as far as it is known; the rest, the named secrets too, out of ``environment``."""
    missing = {*inherited.others, *secrets}
    return {**{name: value for name, value in environment.items() if name in missing}, **inherited.values}


def _may_be_written(name: str, value: str) -> bool:
    known = name.upper() in _NAMES or name.startswith(_FAMILIES)
    fits = _is_text(value) and len(value) <= _LONGEST_VALUE
    return known and fits and not is_secret_name(name) and not holds_secret(f"{name}={value}")


def _is_text(value: str) -> bool:
    """Whether it is UTF-8: an environment may hold any bytes, a record holds text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
