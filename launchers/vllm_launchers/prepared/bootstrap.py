"""Starts vLLM in two steps: everything that needs no GPU now, and the server once it is asked to.

    PYTHON bootstrap.py VLLM_SCRIPT serve MODEL --flags…

A script for the interpreter of the chosen vLLM (3.9 or later), of which nothing else of this program is needed. It
imports vLLM, lets vLLM's own command line and configuration judge the flags, and waits. ``VLLM_SCRIPT`` becomes
``sys.argv[0]``: vLLM's command, or ``vllm.entrypoints.cli.main`` where that module is run instead of a command.

Descriptor 3 is a Unix stream socket. One JSON object per line goes out on it:

- ``{"step": "importing"}`` at once, and again if it starts over to leave the GPU alone
- ``{"step": "imported", "seconds": 8.2, "vllm": "0.32.0"}``
- ``{"step": "judged", "seconds": 8.4, "config_checked": true}``: the flags are accepted. Without ``config_checked``
  only vLLM's parser has judged them
- ``{"step": "accepted", "seconds": 12.4, "cuda_initialized": false, "config_checked": true, …}``: it waits
- ``{"step": "reading", "message": …}``, from time to time: the flags are accepted, and the weights are read ahead
- ``{"step": "refused", "seconds": 8.4, "message": …}``: vLLM does not take the flags, in its own words; exit code 2
- ``{"step": "unprepared", "message": …}``: this vLLM can't be prepared, which says nothing about the flags; exit code 3
- ``{"step": "started"}`` after ``g``: vLLM's ``main`` runs now, in this process

One byte comes in: ``g``, with the descriptor of the server's output file attached. If the socket closes instead, it
ends quietly.

The engine's process is prepared, too: a *spare* Python, its child, has imported what an engine needs and stands in for
the first process that vLLM spawns. It ends with this process.

Until it waits, the model's files are read into the page cache, as far as they are not there yet and memory allows.

Processes that vLLM spawns import this file again, so importing it must do nothing.
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
"""More than the keeper keeps: it cuts after it has hidden secrets, of which half one would not be recognized."""
SPARE_SECONDS = 45.0
"""How long to wait for a spare to be ready. A late one is used, too: it takes its task once it has imported all."""
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
"""What a server imports after it has read its flags. A release that lacks one of them imports something else."""

ENGINE = ("vllm.v1.engine.core", "vllm.v1.core.sched.scheduler", "vllm.v1.executor.uniproc_executor")
"""What the engine's process imports, whatever its worker and model."""

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"

PARSER_ONLY = "VLLMCONSOLE_PREPARED_PARSER_ONLY"
"""Set for itself when it starts over, to the time of its first start: checking the configuration needs the GPU."""

PR_SET_PDEATHSIG = 1


class UnpreparedError(Exception):
    """This vLLM can't be prepared; the message is a clause."""


class FlagsRefusedError(Exception):
    """vLLM does not take the flags; the message is vLLM's."""


class GpuNeededError(Exception):
    """The flags can't be judged without initializing the GPU."""


class KeeperSocket:
    """The socket to the process that started this one."""

    def __init__(self, start: Start) -> None:
        os.set_inheritable(KEEPER_FD, False)
        self._socket = socket.socket(fileno=KEEPER_FD)
        self._began = start.began

    @property
    def seconds(self) -> float:
        """How long this process has been at work."""
        return round(time.monotonic() - self._began, 2)

    def report(self, step: str, **more: Any) -> None:
        """Report a step. Without a keeper there is nothing left to do."""
        line = json.dumps({"step": step, **more}) + "\n"
        flush(ctypes.CDLL(None))  # what was printed until now belongs to this step
        try:
            self._socket.sendall(line.encode())
        except OSError:
            os._exit(0)

    def wait(self) -> int:
        """Wait for the request to continue, or end; returns the descriptor of the server's output file."""
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
    """While it is active, PyTorch refuses to initialize a GPU, and ``needed`` says that something tried."""

    def __init__(self) -> None:
        self.needed = False
        self._originals: list[tuple[Any, Callable[[], None]]] = []

    def begin(self, torch: Any) -> None:
        """From now on it refuses. A PyTorch without GPU support is left as it is."""
        version = torch.version
        if getattr(version, "cuda", None) or getattr(version, "hip", None):
            self._replace(torch.cuda)
        if getattr(version, "xpu", None):
            self._replace(torch.xpu)

    def end(self) -> None:
        """Allow it again."""
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
    """Collect no garbage meanwhile: what is imported stays, and looking for garbage takes a quarter of the time."""
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
    except (Exception, SystemExit) as error:  # a broken installation raises anything; the usual start reports it
        raise UnpreparedError(f"importing it failed: {describe(error)}") from error
    if device not in ("cuda", "cpu", "xpu"):
        raise UnpreparedError(f"whether a {device or 'device of unknown type'} stays untouched is not known")
    if untouched.needed:
        raise UnpreparedError("importing it initializes the GPU")
    return version


def import_early() -> None:
    """Import what the verdict did not need. What can't be imported the server reports, if it needs it."""
    import_each(EARLY)


@without_collection()
def import_each(names: Sequence[str]) -> None:
    """Import these, or those of them that can be."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


class Installation:
    """Files of the imported packages, to notice an upgrade: the server would import the rest from another release."""

    def __init__(self) -> None:
        self._seen = self._look()

    @property
    def changed(self) -> bool:
        """Whether they were replaced since."""
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
    """Let vLLM judge the flags in ``sys.argv``; returns the engine's configuration, None if only the parser judged.

    Raises:
        RefusedError: vLLM does not take them.
        UnpreparedError: it can't be asked.
        GpuNeededError: it needs the GPU for a verdict, and what it has noted without one is not to be relied upon.
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
    """As `judge`, for a vLLM that does not need the GPU."""
    try:
        args = parse(sys.modules[COMMAND_LINE], sys.modules[SERVE])
        if start.parser_only:
            return None
        configuration = configure(args)
    except (FlagsRefusedError, UnpreparedError):
        raise
    except SystemExit as error:
        raise FlagsRefusedError(f"vLLM exited with code {error.code} when it checked its configuration") from error
    except Exception as error:  # whatever vLLM raises about flags
        if says_nothing_about_flags(error):
            raise UnpreparedError(f"its flags can't be checked: {describe(error)}") from error
        raise FlagsRefusedError(describe(error)) from error
    return configuration


def parse(command_line: ModuleType, serve: ModuleType) -> argparse.Namespace:
    """Run vLLM's command line up to where it would serve: parser and quick checks. Returns the arguments."""
    arguments: list[argparse.Namespace] = []

    def keep(args: argparse.Namespace) -> None:
        arguments.append(args)

    command = serve.ServeSubcommand
    original = vars(command).get("cmd")
    command.cmd = staticmethod(keep)
    try:
        if original is None or not all(found.cmd is keep for found in serve.cmd_init()):
            raise UnpreparedError("its command line is laid out in an unknown way")
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
    """The messages with which parsers end the program."""
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
    """The engine's configuration, made as a server makes it; None where that can't be done."""
    if getattr(args, "data_parallel_multi_port_external_lb", False):
        return None  # each rank's server makes its own from other arguments
    args = copy.copy(args)
    if getattr(args, "model_tag", None) is not None:
        args.model = args.model_tag
    options: dict[str, Any] = {}
    with contextlib.suppress(ImportError, AttributeError):  # it chooses among defaults
        options["usage_context"] = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    if getattr(args, "headless", False):
        options["headless"] = True
    return sys.modules[ENGINE_ARGS].AsyncEngineArgs.from_cli_args(args).create_engine_config(**options)


def says_nothing_about_flags(error: BaseException) -> bool:
    """Whether an error comes from a layout that this file does not know, or from the machine as it is now."""
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
    """An error's message. Pydantic's without the values that it checked: keys and tokens are among them."""
    details = getattr(error, "errors", None)
    if type(error).__name__ == "ValidationError" and callable(details):
        with contextlib.suppress(TypeError, KeyError):  # another pydantic
            return "\n".join(validation_message(error, each) for each in details(include_input=False))
    text = str(error).strip()
    if not text or isinstance(error, (KeyError, AssertionError)):
        return f"{type(error).__name__}: {text}".rstrip(": ")
    return text


def validation_message(error: Any, details: dict[str, Any]) -> str:
    """One of a pydantic error's findings: ``SchedulerConfig.max_num_seqs: Input should be greater …``."""
    place = ".".join(str(part) for part in (getattr(error, "title", ""), *details["loc"]) if part != "")
    message = str(details["msg"])
    for prefix in ("Value error, ", "Assertion failed, "):
        if message.startswith(prefix):
            return message[len(prefix) :]
    return f"{place}: {message}"


def shortened(message: str) -> str:
    """A message of bounded length."""
    return message if len(message) <= MESSAGE_CHARACTERS else message[: MESSAGE_CHARACTERS - 1] + "…"


# -- the engine's process ---------------------------------------------------------------------------------------------

SPARE = "--spare"
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_CORE)
MOST_DESCRIPTORS = 200
SPAWN_CALL = re.compile(r"\bspawn_main\((\w+=\d+(?:, \w+=\d+)*)\)\s*$")
"""What Python has a spawned process run, after an import: ``spawn_main(tracker_fd=5, pipe_handle=7)``."""


class Spare:
    """A Python that has imported what an engine needs, to stand in for the first process that vLLM spawns.

    A spawned engine imports everything again, which takes longer than all else between go and the first answer.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._environment = dict(os.environ)
        self._socket, theirs = socket.socketpair()
        words = multiprocessing.spawn.get_command_line()
        words = [*words[: words.index("-c")], __file__, SPARE, str(theirs.fileno()), *modules]
        self._pid = spawn_plainly(os.fsencode(sys.executable), words, [theirs.fileno()])
        theirs.close()
        self._socket.settimeout(SPARE_SECONDS)
        with contextlib.suppress(socket.timeout):  # still ahead of a process that would begin to import only then
            if not self._socket.recv(1):
                self._end()
                raise OSError("the spare has ended")
        self._socket.settimeout(None)

    def lend(self) -> None:
        """From now on it stands in for the first process that is spawned."""
        util: Any = multiprocessing.util
        util.spawnv_passfds = self._spawn

    def _spawn(self, path: Any, args: Sequence[Any], descriptors: Sequence[int]) -> Any:
        if "--multiprocessing-fork" not in args:  # the tracker of resources
            return spawn_plainly(path, args, descriptors)
        util: Any = multiprocessing.util
        util.spawnv_passfds = spawn_plainly
        with contextlib.suppress(OSError):
            if self._is_like(path, descriptors):
                self._hand_over(args, sorted({0, 1, 2, *descriptors}))
                return self._pid  # the socket stays open: a late one says there that it is ready
        self._end()
        return spawn_plainly(path, args, descriptors)

    def _is_like(self, path: Any, descriptors: Sequence[int]) -> bool:
        """Whether it differs from a new process only by its imports."""
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
    """A spare for the engine of this configuration; None where an engine's process is not the first to be spawned."""
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
    """The modules of the model's code."""
    known = sys.modules["vllm.model_executor.models.registry"].ModelRegistry.models
    found = [known.get(name) for name in configuration.model_config.hf_config.architectures]
    return [str(model.module_name) for model in found if hasattr(model, "module_name")]


def be_spare(descriptor: int, modules: Sequence[str]) -> None:
    """Import these, wait, and become the process that is asked for. Without a server there is nothing left to do."""
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
    if untouched.needed or call is None:  # what was imported has missed the GPU, or another layout: import again
        os.execv(sys.executable, task["args"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-c", "--multiprocessing-fork"]
    words = [word.split("=") for word in call[1].split(", ")]
    multiprocessing.spawn.spawn_main(**{name: int(number) for name, number in words})


def die_with_parent(*, yes: bool) -> None:
    """Whether the kernel ends this process when its parent dies. A server survives its keeper."""
    number = signal.SIGKILL if yes else 0
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number), *(ctypes.c_ulong(0),) * 3)


def place_descriptors(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors the numbers that they have in the process that sent them."""
    above = max(numbers) + 1
    safe = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in received]
    for each in received:
        os.close(each)
    for source, number in zip(safe, numbers):  # noqa: B905 - 3.9 has no strict
        os.dup2(source, number)
        os.close(source)


# -- reading the weights ahead ----------------------------------------------------------------------------------------

MEMORY_SHARE = 0.5
"""Of the memory that is available without swapping: the page cache is part of that, and others need the rest."""
READ_SECONDS = 120.0
"""How long the server's start may be put off for it; what is read by then is saved anyway."""
REPORT_SECONDS = 2.0
CHUNK, PAGE = 8 << 20, 4096
READ_FORMATS = ("auto", "hf", "safetensors", "runai_streamer", "fastsafetensors")
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
IOPRIO_IDLE = 3 << 13


class ReadAhead(threading.Thread):
    """Reads files into the page cache: ``read`` bytes of ``size``, of which ``cached`` were there. Files whose pages
    can't be asked for (in memory already, or without a page cache) are left alone, as are those that do not stay.
    """

    def __init__(self, files: Sequence[Path], limit: int) -> None:
        super().__init__(name="read ahead", daemon=True)
        self.size = sum(file.stat().st_size for file in files)
        self.read = self.cached = 0
        self._files, self._limit = files, limit
        self._stopped = threading.Event()

    def run(self) -> None:
        """Read until all is there, the limit is reached or it is stopped."""
        number = IOPRIO_SET.get(platform.machine())
        if number is not None:  # of this thread alone; without effect for some schedulers
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
        """Wait for it, at most this long, and report how far it is; returns what it did, for the server's log."""
        until = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < until:
            self.join(min(REPORT_SECONDS, max(0.0, until - time.monotonic())))
            if self.is_alive():
                report(f"the weights are read ahead, {gib(self.read + self.cached)} of {gib(self.size)} GiB")
        self._stopped.set()
        self.join(REPORT_SECONDS)  # a file system that hangs is not worth waiting for
        return f"weights read ahead: {gib(self.read)} of {gib(self.size)} GiB, {gib(self.cached)} GiB were cached"

    def _read_file(self, descriptor: int) -> bool:
        """Read one file; False to go no further."""
        size = os.fstat(descriptor).st_size
        parts = [(offset, min(CHUNK, size - offset)) for offset in range(0, size, CHUNK)]
        # Known before anything is read: the kernel itself reads ahead, too.
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
    """Whether a part of a file is in the page cache, by three of its pages. Raises OSError if that can't be asked."""
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
    """Begin to read the weights of this configuration ahead; None if there is nothing to read."""
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
    """The files that the weights are read from, in that order; empty if they are not safetensors on this machine."""
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
    """Bytes that can be used without swapping: of the machine, and of the control groups that this process is in."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    found = [int(meminfo["MemAvailable"].split()[0]) << 10]
    own = next(line[3:] for line in [*Path("/proc/self/cgroup").read_text().splitlines(), "0::/"] if line[:3] == "0::")
    place = Path("/sys/fs/cgroup") / own.lstrip("/")
    for folder in (place, *place.parents):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no limit, or another layout
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / "memory.current").read_text()) - int(statistics["inactive_file"])
            found.append(int((folder / "memory.max").read_text()) - used)
    return min(found)


# -- memory of the server before --------------------------------------------------------------------------------------

FREED_SECONDS = 8.0
"""How long to wait for it; the keeper expects a sign of life within ten seconds."""
POLL_SECONDS = 0.05


class Holders:
    """Processes that hold memory of NVIDIA GPUs, by the driver, which takes no memory for that.

    In a container the driver may name processes by other numbers; those are not waited for.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._noted: set[int] = set()
        if getattr(sys.modules["torch"].version, "cuda", None):
            with contextlib.suppress(Exception):  # without a driver, or another layout: the server finds out
                self._nvml = importlib.import_module("vllm.third_party.pynvml")
                self._noted = {pid for pid in self._listed() if runs(pid)}

    def wait(self) -> str:
        """Wait until the driver lists none of those that have ended since; returns what there is to log."""
        began = time.monotonic()
        try:
            while held := {pid for pid in self._noted & self._listed() if not runs(pid)}:
                if time.monotonic() - began >= FREED_SECONDS:
                    return f"GPU memory of ended processes is still held: {', '.join(map(str, sorted(held)))}"
                time.sleep(POLL_SECONDS)
        except Exception as error:  # noqa: BLE001 - the driver's library raises anything; the server finds out
            return f"whether GPU memory was freed is not known: {describe(error)}"
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
    """Let vLLM log again what it logs once only, so that the server's log has it, too."""
    for value in vars(sys.modules.get("vllm.logger") or object).values():
        clear = getattr(value, "cache_clear", None)
        if callable(clear):
            clear()


def take_output(descriptor: int) -> None:
    """Write to this file from now on."""
    libc = ctypes.CDLL(None)
    flush(libc)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)


def flush(libc: ctypes.CDLL) -> None:
    """Write out what Python and C still hold."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    libc.fflush(None)


def become_server(keeper: KeeperSocket) -> NoReturn:
    """Report it and run vLLM's ``main`` as its command does."""
    die_with_parent(yes=False)
    keeper.report("started")
    keeper.close()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(sys.modules[COMMAND_LINE].main())


# -- the whole --------------------------------------------------------------------------------------------------------


def has_safe_path() -> bool:
    """Whether Python was started not to import from the script's folder."""
    return bool(getattr(sys.flags, "safe_path", False) or sys.flags.isolated)


def take_words() -> None:
    """Make ``sys.argv`` and ``sys.path`` those of vLLM's own command."""
    script = sys.argv[1]
    del sys.argv[0]
    if has_safe_path():
        return
    sys.path[0] = str(Path(script).resolve().parent) if "/" in script else os.getcwd()  # noqa: PTH109 - as Python does


class Start(NamedTuple):
    """How this process was started, to start over."""

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
    """How this process was started; to be called before anything is changed."""
    first = os.environ.pop(PARSER_ONLY, "")
    argv = list(getattr(sys, "orig_argv", None) or [sys.executable, *sys.argv])  # 3.9 has no orig_argv
    began = float(first or time.monotonic())
    return Start(began, bool(first), argv, dict(os.environ))


def prepare(keeper: KeeperSocket, untouched: Untouched, start: Start) -> tuple[Installation, Any]:
    """Import vLLM, have it judge the flags, and import what a server needs besides.

    Returns what was imported, and the configuration if it was checked.
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
    for number in (signal.SIGINT, signal.SIGTERM):  # ended at once and without a traceback, also inside an import
        signal.signal(number, signal.SIG_DFL)
    start = noted_start()
    keeper = KeeperSocket(start)
    take_words()
    # vLLM's command does the same. A fork after all these imports could take locks of their threads along.
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
    """Do what the server would spend time on: read its weights into the page cache, start the engine's Python."""
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
