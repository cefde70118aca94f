"""Imports modules once and runs each program in a fork, since imports dominate the cost of short programs.

    PYTHON fork_server.py DESCRIPTOR MODULE...

DESCRIPTOR is a Unix socket of packets. A request is ``{"argv": […], "env": {…}, "cwd": …}``, sent with the program's
descriptors 0, 1, 2 and optionally 3. ``argv`` is what would follow ``python``: ``-c CODE …``, ``-m MODULE …`` or
``SCRIPT …``. There are two responses: ``{"pid": …}`` at once, and ``{"pid": …, "code": …}`` when it has ended, with
the code as in `subprocess`. The server ends when the other end of the socket is closed.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time

MOST_BYTES = 1 << 20
MOST_DESCRIPTORS = 4


def become(request, descriptors):
    """In a fork: run the requested program to its end."""
    os.setsid()
    for target, source in enumerate(descriptors):
        if source == target:
            os.set_inheritable(target, True)
            continue
        os.dup2(source, target)
        os.close(source)
    for name in set(os.environ) - set(request["env"]):
        del os.environ[name]
    os.environ.update(request["env"])
    time.tzset()
    os.chdir(request["cwd"])
    open_streams()
    try:
        run(request["argv"])
        code = 0
    except SystemExit as error:
        code = 0 if error.code is None else error.code
        if not isinstance(code, int):
            raise
    end(code)


def end(code):
    """Exit like Python, but without destroying imported modules, which would copy all of their pages.

    Returns if standard output can't be written: Python has a special exit code for that.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except (OSError, ValueError):
        sys.exit(code)
    os._exit(code & 0xFF)


def run(argv):
    first, *rest = argv
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def open_streams():
    """Open the standard streams as Python does when it starts: a terminal's are line-buffered."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, f"__{name}__")
        mode, buffering = ("r" if name == "stdin" else "w"), (1 if name == "stderr" else -1)
        stream = open(descriptor, mode, buffering, before.encoding, before.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main():
    """Serve requests; a fork returns from here and exits like the program it ran."""
    server = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # garbage collection in a fork would copy the pages of all imported modules
    ready = select.poll()
    ready.register(server, select.POLLIN)
    running = {}  # pid by its pidfd
    while True:
        for descriptor, _ in ready.poll():
            if descriptor != server.fileno():
                ready.unregister(descriptor)
                pid = running.pop(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(BrokenPipeError):
                    server.send(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}).encode())
                continue
            data, descriptors, _, _ = socket.recv_fds(server, MOST_BYTES, MOST_DESCRIPTORS)
            if not data:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                server.close()
                for each in running:
                    os.close(each)
                become(json.loads(data), descriptors)
                return
            for each in descriptors:
                os.close(each)
            running[pidfd := os.pidfd_open(pid)] = pid
            ready.register(pidfd, select.POLLIN)
            server.send(json.dumps({"pid": pid}).encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
