"""The only place that calls NVML. Any single value can be missing; only the driver as a whole can fail.

NVML errors map to three results: an unavailable value (None), a lost GPU (`GpuLostError`), and a driver that cannot be
queried (`DriverError`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from vllm_launchers.host.gpu.host import DriverError, has_driver
from vllm_launchers.host.gpu.vendors import no_driver

_SENTENCES = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed but not loaded; try 'sudo modprobe "
    "nvidia', and check dmesg if that fails",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission to query the NVIDIA driver; this user needs access to "
    "/dev/nvidia* (in a container: start it with --gpus)",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver and its libraries differ in version, as after an "
    "update; restart the machine or reload the nvidia modules",
    pynvml.NVML_ERROR_OPERATING_SYSTEM: "the system has blocked the request to the NVIDIA driver; a container may lack "
    "its devices (/dev/nvidia*)",
    pynvml.NVML_ERROR_GPU_IS_LOST: "the NVIDIA driver has lost its GPUs; restart the machine",
}
_LOST = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, getattr(pynvml, "NVML_ERROR_RESET_REQUIRED", 16)})
_DRIVER = frozenset({pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED})


_OWN: dict[str, Callable[[Any], Any]] = {
    "memory_v2": lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
}
"""Distinct names for calls that pynvml overloads under one name."""


class GpuLostError(Exception):
    """A GPU no longer responds: it fell off the bus or needs a reset."""


class Nvml:
    """An open NVML; not thread-safe. ``call`` remembers functions that this driver lacks, to skip them later."""

    def __init__(self) -> None:
        self._absent: set[str] = set()
        self._functions: dict[str, Any] = {}

    def open(self) -> None:
        """Load the library and initialize the driver.

        Raises:
            DriverError: it can't be queried; one sentence with the reason and what to do.
        """
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise DriverError(_sentence(error)) from error
        except (OSError, AttributeError) as error:
            raise DriverError(f"the NVIDIA driver's library can't be used: {error}") from error

    def close(self) -> None:
        """Shut NVML down; errors are ignored."""
        try:
            pynvml.nvmlShutdown()
        except (pynvml.NVMLError, AttributeError):
            return

    def call(self, name: str, *args: Any) -> Any:
        """The function's result, or None if the value is unavailable (not supported, no permission, …).

        Raises:
            GpuLostError: the queried GPU is lost.
            DriverError: the driver is gone.
        """
        if name in self._absent:
            return None
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = _OWN.get(name) or getattr(pynvml, name, None)
            if function is None:
                self._absent.add(name)
                return None
        try:
            return function(*args)
        except pynvml.NVMLError as error:
            code = error.value
            if code in _LOST:
                raise GpuLostError(_lost_sentence(code)) from error
            if code in _DRIVER:
                raise DriverError(_sentence(error)) from error
            if code == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                self._absent.add(name)
            return None
        except UnicodeDecodeError:
            return None

    def first(self, names: Sequence[str], *args: Any) -> Any:
        """The result of the first function that returns one: newer names first, older ones for older drivers."""
        for name in names:
            answer = self.call(name, *args)
            if answer is not None:
                return answer
        return None

    def fields(self, handle: Any, wanted: Sequence[tuple[int, int]]) -> list[int | float | None]:
        """Field values for (field, scope) pairs, in one call; None for each unavailable one."""
        values = self.call("nvmlDeviceGetFieldValues", handle, list(wanted))
        if values is None:
            return [None] * len(wanted)
        return [_field(value) if value.nvmlReturn == pynvml.NVML_SUCCESS else None for value in values]


_FIELD_TYPES = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    getattr(pynvml, "NVML_VALUE_TYPE_SIGNED_INT", 5): "siVal",
}


def _field(value: Any) -> int | float | None:
    name = _FIELD_TYPES.get(value.valueType)
    found: int | float | None = getattr(value.value, name) if name else None
    return found


def _sentence(error: pynvml.NVMLError) -> str:
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return no_driver()
    return _SENTENCES.get(error.value) or f"the NVIDIA driver can't be queried: {_text(error)}"


def _lost_sentence(code: int) -> str:
    if code == pynvml.NVML_ERROR_GPU_IS_LOST:
        return "fell off the bus (as after Xid 79): processes on it are dead, it comes back with a reset or a restart"
    return "needs a reset before it can be used again ('nvidia-smi --gpu-reset' as root, or a restart)"


def _text(error: pynvml.NVMLError) -> str:
    try:
        return str(error).lower()
    except (OSError, AttributeError):
        return f"code {error.value}"


def driver_version() -> str | None:
    """This machine's NVIDIA driver version, such as ``580.95.05``; None if there is no driver.

    Raises:
        DriverError: it is installed but can't be queried.
    """
    if not has_driver():
        return None
    nvml = Nvml()
    nvml.open()
    version: str | None = nvml.call("nvmlSystemGetDriverVersion")
    nvml.close()
    if version is None:
        raise DriverError("the NVIDIA driver does not report its version")
    return version
