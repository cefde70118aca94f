"""Has imported vLLM, and runs in a fork what it is sent: the import is most of what a short run of vLLM costs.

    PYTHON forks.py DESCRIPTOR

DESCRIPTOR is a Unix socket of packets. A request is ``{"argv": […], "env": {…}}`` with the descriptors of its standard
input, output and error; ``argv`` is what would stand after ``python``: ``-c CODE …`` or ``SCRIPT …``. Two answers:
``{"pid": …}`` at once, and ``{"pid": …, "code": …}`` when it has ended, as in `subprocess`. Without the other end of
the socket it ends.
"""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys

IMPORTED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
)
POLL_SECONDS = 0.05
MOST_BYTES = 1 << 20


def become(request, descriptors):
    """In a fork: be what is asked for, to its end."""
    os.setsid()
    for target, source in enumerate(descriptors):
        os.dup2(source, target)
        os.close(source)
    for name in set(os.environ) - set(request["env"]):
        del os.environ[name]
    os.environ.update(request["env"])
    first, *rest = request["argv"]
    sys.argv = ["-c", *rest[1:]] if first == "-c" else [first, *rest]
    if first == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(first, run_name="__main__")


def main():
    """Serve requests; a fork leaves it by running to its own end."""
    server = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    children = set()
    while True:
        if select.select([server], [], [], POLL_SECONDS if children else None)[0]:
            data, descriptors, _, _ = socket.recv_fds(server, MOST_BYTES, 3)
            if not data:
                os._exit(0)
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                server.close()
                become(json.loads(data), descriptors)
                return
            for descriptor in descriptors:
                os.close(descriptor)
            children.add(pid)
            server.send(json.dumps({"pid": pid}).encode())
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                server.send(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
