"""Starts vLLM in two steps: first everything that needs no GPU, then the server when asked.

    PYTHON bootstrap.py VLLM_SCRIPT serve MODEL --flags…

A script for the interpreter of the chosen vLLM (Python 3.9 or later) that needs nothing else of this program. It
imports vLLM, lets vLLM's own command line and configuration check the flags, and waits. ``VLLM_SCRIPT`` becomes
``sys.argv[0]``: vLLM's command, or ``vllm.entrypoints.cli.main`` if that module is run instead of a command.

Descriptor 3 is a Unix stream socket. The script writes one JSON object per line:

- ``{"step": "importing"}`` immediately, and again if it starts over to leave the GPU alone
- ``{"step": "imported", "seconds": 8.2, "vllm": "0.32.0"}``
- ``{"step": "judged", "seconds": 8.4, "config_checked": true}``: the flags are accepted. If ``config_checked`` is
  false, only vLLM's parser has checked them
- ``{"step": "accepted", "seconds": 12.4, "cuda_initialized": false, "config_checked": true, …}``: it waits
- ``{"step": "reading", "message": …}`` repeatedly: the flags are accepted and the weights are being read ahead
- ``{"step": "refused", "seconds": 8.4, "message": …}``: vLLM rejects the flags, with its own message; exit code 2
- ``{"step": "unprepared", "message": …}``: this vLLM can't be prepared, regardless of the flags; exit code 3
- ``{"step": "started"}`` after ``g``: vLLM's ``main`` now runs in this process

It reads one byte: ``g``, with the descriptor of the server's output file attached. If the socket closes instead, it
exits silently.

The engine's process is prepared, too: a child, the *spare* Python, has imported what an engine needs and replaces the
first process that vLLM spawns. It ends with this process.

Before the script waits, it reads those of the model's files that are not cached into the page cache, as far as memory
allows.

Processes spawned by vLLM import this file again, so importing it must do nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.spawn
import multiprocessing.util
import os
import platform
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

KEEPER_FD = 3
MESSAGE_CHARACTERS = 10_000
"""More than the keeper keeps: it truncates only after redaction, because half a secret would not be recognized."""
SPARE_SECONDS = 45.0
"""How long to wait for a spare to be ready. A late one is used, too: it takes its task once its imports are done."""
REFUSED, UNPREPARED = 2, 3

COMMAND_LINE = "vllm.entrypoints.cli.main"
SERVE = "vllm.entrypoints.cli.serve"
ENGINE_ARGS = "vllm.engine.arg_utils"

EARLY = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.models.registry",
    "vllm.renderers.hf",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.serve.instrumentator.metrics",
    "model_hosting_container_standards.sagemaker",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "uvicorn.lifespan.on",
    "transformers",
)
"""What a server imports after reading its flags. A release without one of these modules imports something else."""

ENGINE = ("vllm.v1.engine.core", "vllm.v1.core.sched.scheduler", "vllm.v1.executor.uniproc_executor")
"""What the engine's process imports, for any worker and model."""

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"

PARSER_ONLY = "VLLMCONSOLE_PREPARED_PARSER_ONLY"
"""Set when starting over, to the time of the first start: checking the configuration would need the GPU."""

PR_SET_PDEATHSIG = 1


class UnpreparedError(Exception):
    """This vLLM can't be prepared; the message is a clause."""


class FlagsRefusedError(Exception):
    """vLLM rejects the flags; the message is vLLM's."""


class GpuNeededError(Exception):
    """The flags can't be checked without initializing the GPU."""


class KeeperSocket:
    """The socket to the process that started this one."""

    def __init__(self, start: Start) -> None:
        os.set_inheritable(KEEPER_FD, False)
        self._socket = socket.socket(fileno=KEEPER_FD)
        self._began = start.began

    @property
    def seconds(self) -> float:
        """Seconds since this process started."""
        return round(time.monotonic() - self._began, 2)

    def report(self, step: str, **more: Any) -> None:
        """Report a step. Exits if there is no keeper any more."""
        line = json.dumps({"step": step, **more}) + "\n"
        flush(ctypes.CDLL(None))  # output so far belongs to this step
        try:
            self._socket.sendall(line.encode())
        except OSError:
            os._exit(0)

    def wait(self) -> int:
        """Wait for the request to continue (else exit); returns the descriptor of the server's output file."""
        try:
            word, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            os._exit(0)
        if word != b"g" or len(descriptors) != 1:
            os._exit(0)
        return descriptors[0]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


# -- leaving the GPU alone --------------------------------------------------------------------------------------------


class Untouched:
    """While active, makes PyTorch refuse to initialize a GPU; ``needed`` shows that something tried."""

    def __init__(self) -> None:
        self.needed = False
        self._originals: list[tuple[Any, Callable[[], None]]] = []

    def begin(self, torch: Any) -> None:
        """Start refusing. A PyTorch without GPU support is left alone."""
        version = torch.version
        if getattr(version, "cuda", None) or getattr(version, "hip", None):
            self._replace(torch.cuda)
        if getattr(version, "xpu", None):
            self._replace(torch.xpu)

    def end(self) -> None:
        """Allow initialization again."""
        for module, original in self._originals:
            module._lazy_init = original
        self._originals.clear()

    def _replace(self, module: Any) -> None:
        self._originals.append((module, module._lazy_init))
        module._lazy_init = self._refuse

    def _refuse(self) -> NoReturn:
        self.needed = True
        raise RuntimeError("the GPU stays untouched until the server starts")


# -- importing --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection: what is imported stays, and collection would take a quarter of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@without_collection()
def import_vllm(untouched: Untouched) -> str:
    """Import what a server needs; returns vLLM's version. Raises `UnpreparedError`."""
    try:
        version = str(importlib.import_module("vllm").__version__)  # sets variables that PyTorch reads, and imports it
        untouched.begin(importlib.import_module("torch"))
        for name in (COMMAND_LINE, SERVE, ENGINE_ARGS):
            importlib.import_module(name)
        device = importlib.import_module("vllm.platforms").current_platform.device_type
    except (Exception, SystemExit) as error:  # a broken installation raises anything; the normal start reports it
        raise UnpreparedError(f"importing it failed: {describe(error)}") from error
    if device not in ("cuda", "cpu", "xpu"):
        raise UnpreparedError(f"it is unknown whether a {device or 'device of unknown type'} stays untouched")
    if untouched.needed:
        raise UnpreparedError("importing it initializes the GPU")
    return version


def import_early() -> None:
    """Import what checking the flags did not need. The server reports an import that fails, if it needs it."""
    import_each(EARLY)


@without_collection()
def import_each(names: Sequence[str]) -> None:
    """Import as many of these as possible."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


class Installation:
    """Files of the imported packages, to detect an upgrade: the server would import the rest from another release."""

    def __init__(self) -> None:
        self._seen = self._look()

    @property
    def changed(self) -> bool:
        """Whether they have been replaced."""
        now = self._look()
        return any(now.get(path) != seen for path, seen in self._seen.items())

    @staticmethod
    def _look() -> dict[str, tuple[int, int] | None]:
        found: dict[str, tuple[int, int] | None] = {}
        for name in ("vllm", "vllm.version", ENGINE_ARGS, "torch", "torch.version", "transformers"):
            path = getattr(sys.modules.get(name), "__file__", None)
            if path is None:
                continue
            try:
                status = Path(path).stat()
                found[path] = (status.st_ino, status.st_mtime_ns)
            except OSError:
                found[path] = None
        return found


# -- vLLM's verdict ---------------------------------------------------------------------------------------------------


def judge(untouched: Untouched, start: Start) -> Any:
    """Let vLLM check the flags in ``sys.argv``; returns the engine's configuration, or None if only the parser ran.

    Raises:
        FlagsRefusedError: vLLM rejects them.
        UnpreparedError: vLLM can't check them.
        GpuNeededError: checking needs the GPU, so results without it are unreliable.
    """
    try:
        configuration = verdict(start)
    except (FlagsRefusedError, UnpreparedError) as error:
        if untouched.needed:
            raise GpuNeededError from error
        raise
    if untouched.needed:
        raise GpuNeededError
    return configuration


def verdict(start: Start) -> Any:
    """Like `judge`, but assumes that the GPU is not needed."""
    try:
        args = parse(sys.modules[COMMAND_LINE], sys.modules[SERVE])
        if start.parser_only:
            return None
        configuration = configure(args)
    except (FlagsRefusedError, UnpreparedError):
        raise
    except SystemExit as error:
        raise FlagsRefusedError(f"vLLM exited with code {error.code} when it checked its configuration") from error
    except Exception as error:  # anything that vLLM raises about flags
        if says_nothing_about_flags(error):
            raise UnpreparedError(f"its flags can't be checked: {describe(error)}") from error
        raise FlagsRefusedError(describe(error)) from error
    return configuration


def parse(command_line: ModuleType, serve: ModuleType) -> argparse.Namespace:
    """Run vLLM's command line (parser and quick checks) up to the point where it would serve. Returns the arguments."""
    arguments: list[argparse.Namespace] = []

    def keep(args: argparse.Namespace) -> None:
        arguments.append(args)

    command = serve.ServeSubcommand
    original = vars(command).get("cmd")
    command.cmd = staticmethod(keep)
    try:
        if original is None or not all(found.cmd is keep for found in serve.cmd_init()):
            raise UnpreparedError("its command line has an unknown structure")
        with noted_exits() as messages:
            command_line.main()
    except SystemExit as error:
        if not error.code:
            raise UnpreparedError("this command line does not serve") from error
        text = "".join(messages) or (error.code if isinstance(error.code, str) else "")
        raise FlagsRefusedError(text.strip() or f"vLLM exited with code {error.code} when it read the flags") from error
    finally:
        command.cmd = original
    if len(arguments) != 1:
        raise UnpreparedError("its command line ended without serving")
    return arguments[0]


@contextlib.contextmanager
def noted_exits() -> Iterator[list[str]]:
    """Collect the messages with which parsers exit."""
    messages: list[str] = []
    original = argparse.ArgumentParser.exit

    def leave(parser: argparse.ArgumentParser, status: int = 0, message: str | None = None) -> NoReturn:
        messages.append(message or "")
        original(parser, status, message)

    parser_class: Any = argparse.ArgumentParser
    parser_class.exit = leave
    try:
        yield messages
    finally:
        parser_class.exit = original


def configure(args: argparse.Namespace) -> Any:
    """The engine's configuration, created the way a server does it; None if that is not possible."""
    if getattr(args, "data_parallel_multi_port_external_lb", False):
        return None  # each rank's server creates its own from other arguments
    args = copy.copy(args)
    if getattr(args, "model_tag", None) is not None:
        args.model = args.model_tag
    options: dict[str, Any] = {}
    with contextlib.suppress(ImportError, AttributeError):  # it affects defaults
        options["usage_context"] = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    if getattr(args, "headless", False):
        options["headless"] = True
    return sys.modules[ENGINE_ARGS].AsyncEngineArgs.from_cli_args(args).create_engine_config(**options)


def says_nothing_about_flags(error: BaseException) -> bool:
    """Whether an error is caused by a vLLM layout unknown to this file, or by the machine's current state."""
    if isinstance(error, ImportError):
        return (error.name or "").partition(".")[0] == "vllm"
    if isinstance(error, (AttributeError, NameError, MemoryError)):
        return True
    if traceback.extract_tb(error.__traceback__)[-1].filename == __file__:
        return True
    if type(error).__module__.partition(".")[0] == "torch" or type(error).__name__.startswith("NVMLError"):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("CUDA", "HIP", "out of memory"))


def describe(error: BaseException) -> str:
    """An error's message; pydantic's without the checked values, which may include keys and tokens."""
    details = getattr(error, "errors", None)
    if type(error).__name__ == "ValidationError" and callable(details):
        with contextlib.suppress(TypeError, KeyError):  # another pydantic version
            return "\n".join(validation_message(error, each) for each in details(include_input=False))
    text = str(error).strip()
    if not text or isinstance(error, (KeyError, AssertionError)):
        return f"{type(error).__name__}: {text}".rstrip(": ")
    return text


def validation_message(error: Any, details: dict[str, Any]) -> str:
    """One finding of a pydantic error: ``SchedulerConfig.max_num_seqs: Input should be greater …``."""
    place = ".".join(str(part) for part in (getattr(error, "title", ""), *details["loc"]) if part != "")
    message = str(details["msg"])
    for prefix in ("Value error, ", "Assertion failed, "):
        if message.startswith(prefix):
            return message[len(prefix) :]
    return f"{place}: {message}"


def shortened(message: str) -> str:
    """The message, truncated to `MESSAGE_CHARACTERS`."""
    return message if len(message) <= MESSAGE_CHARACTERS else message[: MESSAGE_CHARACTERS - 1] + "…"


# -- the engine's process ---------------------------------------------------------------------------------------------

SPARE = "--spare"
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_CORE)
MOST_DESCRIPTORS = 200
SPAWN_CALL = re.compile(r"\bspawn_main\((\w+=\d+(?:, \w+=\d+)*)\)\s*$")
"""What a Python process spawned by ``multiprocessing`` runs after an import: ``spawn_main(tracker_fd=5, …)``."""


class Spare:
    """A Python process with an engine's imports done, which replaces the first process that vLLM spawns.

    A spawned engine imports everything again, which takes longer than everything else between ``g`` and the first
    answer.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._environment = dict(os.environ)
        self._socket, theirs = socket.socketpair()
        words = multiprocessing.spawn.get_command_line()
        words = [*words[: words.index("-c")], __file__, SPARE, str(theirs.fileno()), *modules]
        self._pid = spawn_plainly(os.fsencode(sys.executable), words, [theirs.fileno()])
        theirs.close()
        self._socket.settimeout(SPARE_SECONDS)
        with contextlib.suppress(socket.timeout):  # even a late spare is ahead of a process that starts importing then
            if not self._socket.recv(1):
                self._end()
                raise OSError("the spare has ended")
        self._socket.settimeout(None)

    def lend(self) -> None:
        """Use the spare for the first process that is spawned from now on."""
        util: Any = multiprocessing.util
        util.spawnv_passfds = self._spawn

    def _spawn(self, path: Any, args: Sequence[Any], descriptors: Sequence[int]) -> Any:
        if "--multiprocessing-fork" not in args:  # the resource tracker
            return spawn_plainly(path, args, descriptors)
        util: Any = multiprocessing.util
        util.spawnv_passfds = spawn_plainly
        with contextlib.suppress(OSError):
            if self._is_like(path, descriptors):
                self._hand_over(args, sorted({0, 1, 2, *descriptors}))
                return self._pid  # the socket stays open, because a late spare reports on it that it is ready
        self._end()
        return spawn_plainly(path, args, descriptors)

    def _is_like(self, path: Any, descriptors: Sequence[int]) -> bool:
        """Whether the spare differs from a new process only by its imports."""
        usual = os.fsdecode(path) == sys.executable and len(descriptors) < MOST_DESCRIPTORS
        return usual and dict(os.environ) == self._environment

    def _hand_over(self, args: Sequence[Any], descriptors: Sequence[int]) -> None:
        for limit in LIMITS:
            resource.prlimit(self._pid, limit, resource.getrlimit(limit))
        os.sched_setaffinity(self._pid, os.sched_getaffinity(0))
        message = json.dumps({"args": [os.fsdecode(word) for word in args], "descriptors": list(descriptors)}).encode()
        socket.send_fds(self._socket, [message], list(descriptors))

    def _end(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


spawn_plainly: Any = multiprocessing.util.spawnv_passfds


def start_spare(configuration: Any) -> Spare | None:
    """A spare for this configuration's engine; None if the engine is not the first process to be spawned."""
    try:
        parallel = configuration.parallel_config
        if os.environ[METHOD] != "spawn" or parallel.data_parallel_size != 1:
            return None
        worker = str(parallel.worker_cls).rpartition(".")[0]
        modules = [*ENGINE, worker, worker.replace("_worker", "_model_runner"), *model_modules(configuration)]
        return Spare([module for module in modules if module])
    except Exception:  # noqa: BLE001 - it saves time only: whatever is laid out otherwise, a server does without it
        return None


def model_modules(configuration: Any) -> list[str]:
    """The modules that contain the model's code."""
    known = sys.modules["vllm.model_executor.models.registry"].ModelRegistry.models
    found = [known.get(name) for name in configuration.model_config.hf_config.architectures]
    return [str(model.module_name) for model in found if hasattr(model, "module_name")]


def be_spare(descriptor: int, modules: Sequence[str]) -> None:
    """Import these modules, wait, and become the requested process. Exits if the server is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent(yes=True)  # also while it imports
    server = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    if not has_safe_path():
        del sys.path[0]
    untouched = Untouched()
    with contextlib.suppress(Exception), without_collection():
        importlib.import_module("vllm")
        untouched.begin(importlib.import_module("torch"))
    import_each(modules)
    untouched.end()
    try:
        server.sendall(b"r")
        data, received, _, _ = socket.recv_fds(server, 1 << 16, MOST_DESCRIPTORS + 3)
    except OSError:
        os._exit(0)
    if not data:
        os._exit(0)
    server.close()
    task = json.loads(data)
    flush(ctypes.CDLL(None))
    place_descriptors(received, task["descriptors"])
    die_with_parent(yes=False)
    call = SPAWN_CALL.search(task["args"][task["args"].index("-c") + 1])
    if untouched.needed or call is None:  # an import needed the GPU, or an unknown layout: import again
        os.execv(sys.executable, task["args"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-c", "--multiprocessing-fork"]
    words = [word.split("=") for word in call[1].split(", ")]
    multiprocessing.spawn.spawn_main(**{name: int(number) for name, number in words})


def die_with_parent(*, yes: bool) -> None:
    """Set whether the kernel kills this process when its parent dies. A server outlives its keeper."""
    number = signal.SIGKILL if yes else 0
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number), *(ctypes.c_ulong(0),) * 3)


def place_descriptors(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors the numbers that they have in the sending process."""
    above = max(numbers) + 1
    safe = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in received]
    for each in received:
        os.close(each)
    for source, number in zip(safe, numbers):  # noqa: B905 - 3.9 has no strict
        os.dup2(source, number)
        os.close(source)


# -- reading the weights ahead ----------------------------------------------------------------------------------------

MEMORY_SHARE = 0.5
"""Share of the memory available without swapping, which includes the page cache; others need the rest."""
READ_SECONDS = 120.0
"""Maximum delay of the server's start for reading ahead; what has been read by then still saves time."""
REPORT_SECONDS = 2.0
CHUNK, PAGE = 8 << 20, 4096
READ_FORMATS = ("auto", "hf", "safetensors", "runai_streamer", "fastsafetensors")
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
IOPRIO_IDLE = 3 << 13


class ReadAhead(threading.Thread):
    """Reads files into the page cache: ``read`` bytes of ``size``, of which ``cached`` were already there. Stops at a
    file whose page cache can't be queried (already in memory, or without one) or does not keep what is read.
    """

    def __init__(self, files: Sequence[Path], limit: int) -> None:
        super().__init__(name="read ahead", daemon=True)
        self.size = sum(file.stat().st_size for file in files)
        self.read = self.cached = 0
        self._files, self._limit = files, limit
        self._stopped = threading.Event()

    def run(self) -> None:
        """Read until everything is cached, the limit is reached, or it is stopped."""
        number = IOPRIO_SET.get(platform.machine())
        if number is not None:  # for this thread only; some schedulers ignore it
            ctypes.CDLL(None).syscall(number, 1, 0, IOPRIO_IDLE)
        with contextlib.suppress(OSError):  # the server reports what it can't read
            for file in self._files:
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if not self._read_file(descriptor):
                        return
                finally:
                    os.close(descriptor)

    def finish(self, seconds: float, report: Callable[[str], None]) -> str:
        """Wait at most ``seconds`` while reporting progress; returns a summary for the server's log."""
        until = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < until:
            self.join(min(REPORT_SECONDS, max(0.0, until - time.monotonic())))
            if self.is_alive():
                report(f"the weights are read ahead, {gib(self.read + self.cached)} of {gib(self.size)} GiB")
        self._stopped.set()
        self.join(REPORT_SECONDS)  # do not wait for a hanging file system
        return f"weights read ahead: {gib(self.read)} of {gib(self.size)} GiB, {gib(self.cached)} GiB were cached"

    def _read_file(self, descriptor: int) -> bool:
        """Read one file; False to stop reading."""
        size = os.fstat(descriptor).st_size
        parts = [(offset, min(CHUNK, size - offset)) for offset in range(0, size, CHUNK)]
        # Determined before anything is read, because the kernel reads ahead, too.
        missing = [(offset, length) for offset, length in parts if not is_cached(descriptor, offset, length)]
        self.cached += size - sum(length for _, length in missing)
        buffer = bytearray(CHUNK)
        for offset, length in missing:
            if self._stopped.is_set() or self.read + length > self._limit:
                return False
            if not os.preadv(descriptor, [buffer], offset):
                return False
            self.read += length
            if not is_cached(descriptor, offset, length):
                return False
        return True


def is_cached(descriptor: int, offset: int, length: int) -> bool:
    """Whether a part of a file is in the page cache, judged by three of its pages. Raises OSError if unsupported."""
    page = bytearray(PAGE)
    try:
        return all(
            os.preadv(descriptor, [page], place, os.RWF_NOWAIT) > 0
            for place in (offset, offset + length // 2, offset + length - 1)
        )
    except BlockingIOError:
        return False


def gib(amount: int) -> str:
    """Bytes as GiB."""
    return f"{amount / (1 << 30):.2f}"


def start_reading(configuration: Any) -> ReadAhead | None:
    """Start reading this configuration's weights ahead; None if there is nothing to read."""
    try:
        files = read_ahead_files(configuration) if configuration is not None else []
        limit = int(MEMORY_SHARE * available_memory())
        if not files or limit < CHUNK:
            return None
        reader = ReadAhead(files, limit)
        reader.start()
    except Exception:  # noqa: BLE001 - it saves time only: whatever is laid out otherwise, a server does without it
        return None
    return reader


def read_ahead_files(configuration: Any) -> list[Path]:
    """The weight files in loading order; empty if they are not safetensors files on this machine."""
    model, load = configuration.model_config, configuration.load_config
    if str(getattr(load.load_format, "value", load.load_format)) not in READ_FORMATS:
        return []
    folder = Path(model.model)
    if not folder.is_dir():
        find = importlib.import_module("huggingface_hub").try_to_load_from_cache
        known = find(model.model, "config.json", cache_dir=load.download_dir, revision=model.revision)
        if not isinstance(known, str):
            return []
        folder = Path(known).parent
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        names = [name for name in names if not name.startswith("consolidated")] or names
    return [path for path in (folder / name for name in names) if path.is_file()]


def available_memory() -> int:
    """Bytes available without swapping, on the machine and in the control groups of this process."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    found = [int(meminfo["MemAvailable"].split()[0]) << 10]
    own = next(line[3:] for line in [*Path("/proc/self/cgroup").read_text().splitlines(), "0::/"] if line[:3] == "0::")
    place = Path("/sys/fs/cgroup") / own.lstrip("/")
    for folder in (place, *place.parents):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no limit, or an unknown layout
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / "memory.current").read_text()) - int(statistics["inactive_file"])
            found.append(int((folder / "memory.max").read_text()) - used)
    return min(found)


# -- memory of the previous server ------------------------------------------------------------------------------------

FREED_SECONDS = 8.0
"""How long to wait for it to be freed; the keeper expects a sign of life within ten seconds."""
POLL_SECONDS = 0.05


class Holders:
    """Processes that hold memory of NVIDIA GPUs, according to the driver; querying it takes no GPU memory.

    In a container the driver may report other pids; those are not waited for.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._noted: set[int] = set()
        if getattr(sys.modules["torch"].version, "cuda", None):
            with contextlib.suppress(Exception):  # without a driver, or another layout: the server finds out
                self._nvml = importlib.import_module("vllm.third_party.pynvml")
                self._noted = {pid for pid in self._listed() if runs(pid)}

    def wait(self) -> str:
        """Wait until the driver no longer lists processes that have ended; returns a line for the log."""
        began = time.monotonic()
        try:
            while held := {pid for pid in self._noted & self._listed() if not runs(pid)}:
                if time.monotonic() - began >= FREED_SECONDS:
                    return f"GPU memory of ended processes is still held: {', '.join(map(str, sorted(held)))}"
                time.sleep(POLL_SECONDS)
        except Exception as error:  # noqa: BLE001 - the driver's library raises anything; the server finds out
            return f"it is unknown whether GPU memory was freed: {describe(error)}"
        return f"GPU memory was free after {time.monotonic() - began:.1f} s" if self._noted else ""

    def _listed(self) -> set[int]:
        if self._nvml is None:
            return set()
        self._nvml.nvmlInit()
        try:
            handles = map(self._nvml.nvmlDeviceGetHandleByIndex, range(self._nvml.nvmlDeviceGetCount()))
            return {one.pid for each in handles for one in self._nvml.nvmlDeviceGetComputeRunningProcesses(each)}
        finally:
            self._nvml.nvmlShutdown()


def runs(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# -- becoming the server ----------------------------------------------------------------------------------------------


def repeat_messages() -> None:
    """Let vLLM repeat messages that it logs only once, so that they are in the server's log, too."""
    for value in vars(sys.modules.get("vllm.logger") or object).values():
        clear = getattr(value, "cache_clear", None)
        if callable(clear):
            clear()


def take_output(descriptor: int) -> None:
    """Redirect output to this file."""
    libc = ctypes.CDLL(None)
    flush(libc)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)


def flush(libc: ctypes.CDLL) -> None:
    """Flush the buffers of Python and C."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    libc.fflush(None)


def become_server(keeper: KeeperSocket) -> NoReturn:
    """Report the start and run vLLM's ``main`` the way its command does."""
    die_with_parent(yes=False)
    keeper.report("started")
    keeper.close()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(sys.modules[COMMAND_LINE].main())


# -- main -------------------------------------------------------------------------------------------------------------


def has_safe_path() -> bool:
    """Whether Python was told not to import from the script's folder."""
    return bool(getattr(sys.flags, "safe_path", False) or sys.flags.isolated)


def take_words() -> None:
    """Make ``sys.argv`` and ``sys.path`` those of vLLM's own command."""
    script = sys.argv[1]
    del sys.argv[0]
    if has_safe_path():
        return
    sys.path[0] = str(Path(script).resolve().parent) if "/" in script else os.getcwd()  # noqa: PTH109 - as Python does


class Start(NamedTuple):
    """How this process was started, for starting over."""

    began: float
    parser_only: bool
    argv: list[str]
    environment: dict[str, str]

    def again(self) -> NoReturn:
        """Start over without checking the configuration."""
        os.set_inheritable(KEEPER_FD, True)
        flush(ctypes.CDLL(None))
        os.execve(sys.executable, self.argv, {**self.environment, PARSER_ONLY: str(self.began)})


def noted_start() -> Start:
    """How this process was started; call this before anything is changed."""
    first = os.environ.pop(PARSER_ONLY, "")
    argv = list(getattr(sys, "orig_argv", None) or [sys.executable, *sys.argv])  # 3.9 has no orig_argv
    began = float(first or time.monotonic())
    return Start(began, bool(first), argv, dict(os.environ))


def prepare(keeper: KeeperSocket, untouched: Untouched, start: Start) -> tuple[Installation, Any]:
    """Import vLLM, let it check the flags, and import whatever else a server needs.

    Returns the imported installation, and the configuration if it was checked.
    """
    if sys.argv[1:2] != ["serve"] or "--omni" in sys.argv:
        raise UnpreparedError("only 'vllm serve' can be prepared")
    keeper.report("importing")
    version = import_vllm(untouched)
    installation = Installation()
    keeper.report("imported", seconds=keeper.seconds, vllm=version)
    configuration = judge(untouched, start)
    keeper.report("judged", seconds=keeper.seconds, config_checked=configuration is not None)
    if not start.parser_only:
        import_early()
        if untouched.needed:
            raise GpuNeededError
    return installation, configuration


def give_up(keeper: KeeperSocket, message: str) -> NoReturn:
    """Report that this vLLM can't be prepared."""
    keeper.report("unprepared", message=shortened(message))
    sys.exit(UNPREPARED)


def main() -> NoReturn:
    """Prepare, wait, become the server."""
    for number in (signal.SIGINT, signal.SIGTERM):  # end immediately and without a traceback, even during an import
        signal.signal(number, signal.SIG_DFL)
    start = noted_start()
    keeper = KeeperSocket(start)
    take_words()
    # vLLM's command does the same. After all these imports, a fork could inherit locks held by their threads.
    os.environ.setdefault(METHOD, "spawn")
    untouched = Untouched()
    try:
        installation, configuration = prepare(keeper, untouched, start)
    except FlagsRefusedError as error:
        show(error)
        keeper.report("refused", seconds=keeper.seconds, message=shortened(str(error)))
        sys.exit(REFUSED)
    except UnpreparedError as error:
        show(error)
        give_up(keeper, str(error))
    except GpuNeededError:
        if start.parser_only:
            give_up(keeper, "reading the flags initializes the GPU")
        start.again()
    untouched.end()
    spare = load_ahead(keeper, configuration)
    initialized = bool(sys.modules["torch"].cuda.is_initialized())
    checked = configuration is not None
    del configuration
    holders = Holders()
    keeper.report("accepted", seconds=keeper.seconds, cuda_initialized=initialized, config_checked=checked)
    output = keeper.wait()
    if installation.changed:
        give_up(keeper, "its files were replaced after it was imported")
    repeat_messages()
    take_output(output)
    if freed := holders.wait():
        print(freed)
    if spare is not None:
        spare.lend()
    become_server(keeper)


def load_ahead(keeper: KeeperSocket, configuration: Any) -> Spare | None:
    """Do in advance what would delay the server: read its weights into the page cache and start the engine's Python."""
    reader = start_reading(configuration)
    spare = start_spare(configuration)
    if reader is not None:
        print(reader.finish(READ_SECONDS, lambda message: keeper.report("reading", message=message)))
    print(f"prepared in {keeper.seconds:g} s")
    return spare


def show(error: BaseException) -> None:
    """Print the traceback of what vLLM raised; a parser has printed its own message."""
    if error.__cause__ is not None and not isinstance(error.__cause__, SystemExit):
        traceback.print_exception(type(error.__cause__), error.__cause__, error.__cause__.__traceback__)


if __name__ == "__main__":
    if sys.argv[1:2] == [SPARE]:
        be_spare(int(sys.argv[2]), sys.argv[3:])
    else:
        main()
