"""Reads inputs of 100 MB, or responses of a hostile server, with limited memory: ``FOLDER`` or ``--http PORT``.

Prints each result as JSON: an error message, or the type of an unexpected error.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fakes.hostile_http import KINDS, THEN
from vllm_console.alerts.notifier import FindingsLog
from vllm_console.cli.host_source import host_from_matrix
from vllm_console.cli.metrics import read_sample
from vllm_console.load import client as load_client
from vllm_console.load.client import StreamedAnswer
from vllm_console.load.events import AnswerError
from vllm_console.load.report import Tally
from vllm_console.load.run import run_load_sync
from vllm_console.logs.file import LogFile
from vllm_console.metrics.scrape import ScrapeError, Scraper
from vllm_console.settings import ConfigError, read_settings
from vllm_launchers.errors import OperationError
from vllm_launchers.host.board import read_board
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.gpu.host import HostError
from vllm_launchers.keeper import folders, process_group, wire
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.presets.load import read_presets
from vllm_launchers.presets.model import Workload
from vllm_launchers.vllm.modelfacts.facts import ModelFactsError
from vllm_launchers.vllm.modelfacts.read import model_facts
from vllm_launchers.vllm.startup_reports import StartupReportStore

ROOM = 90 << 20
"""Bytes for each reader: less than its input."""
ROOM_OF_A_LOG = 200 << 20
"""Bytes for log readers, which read windows of a few MB and decode one line of this log of 400 MB."""
ROOM_OF_ALL = 320 << 20
SENTENCES = (
    ConfigError, OperationError, KeeperError, HostError, ModelFactsError, ScrapeError, AnswerError,
    load_client.LoadError
)  # fmt: skip


def limit(room: int) -> None:
    """Limit memory to the current use plus ``room``."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + room, resource.getrlimit(resource.RLIMIT_AS)[1]))


def told(read: Callable[[], object]) -> str:
    try:
        return f"read: {str(read())[:300]}"
    except SENTENCES as error:
        return f"sentence: {error}"
    except Exception as error:  # noqa: BLE001 - all that may go wrong is looked for
        return f"fault: {type(error).__name__}: {error}"


def stream(path: Path) -> object:
    answer = StreamedAnswer(Tally())
    with path.open("rb") as file:
        while piece := file.read(1 << 16):
            answer.feed(piece, 1.0)
    return answer.end()


def answered(path: Path) -> object:
    """Read such a response of a keeper as a console does."""
    with tempfile.TemporaryDirectory() as name:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{name}/{wire.SOCKET}")
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, path.open("rb") as file:
                try:
                    while piece := file.read(1 << 16):
                        connection.sendall(piece)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        return wire.ask(Path(name), {"do": "read"}, 30)


def asked(path: Path) -> object:
    """Send such a request to a keeper, which ignores it and continues."""
    with tempfile.TemporaryDirectory() as name:
        posted: list[object] = []
        wire.RequestListener(Path(name), posted.append).start()
        with socket.socket(socket.AF_UNIX) as connection, path.open("rb") as file:
            connection.connect(f"{name}/{wire.SOCKET}")
            try:
                while piece := file.read(1 << 16):
                    connection.sendall(piece)
            except OSError:
                return f"hung up, {posted}"
        return f"all taken, {posted}"


def files(folder: Path) -> dict[str, str]:
    """Run each file reader on the inputs in the folder, which have the names that it expects."""
    found = {}
    for kind in ("deep", "flat"):
        at = folder / kind
        readers: dict[str, Callable[[], object]] = {
            "presets": lambda at=at: [str(error) for error in read_presets(at)[1]],
            "config": lambda at=at: read_settings(at / "huge.toml"),
            "host document": lambda at=at: read_host(at / "huge"),
            "topology": lambda at=at: host_from_matrix(at / "huge", None),
            "metrics": lambda at=at: read_sample(str(at / "huge"), 1.0),
            "record": lambda at=at: folders.read_record(at),
            "members": lambda at=at: process_group.recorded(at),
            "findings": lambda at=at: list(FindingsLog(at).read()),
            "reports": lambda at=at: StartupReportStore(at / "reports.json").entries(),
            "model": lambda at=at: model_facts(str(at)),
            "log": lambda at=at: len(LogFile(at / "huge.log").tail(100)),
            "stream": lambda at=at: stream(at / "huge"),
            "keeper's answer": lambda at=at: answered(at / "huge"),
            "keeper's request": lambda at=at: asked(at / "huge"),
            "board": lambda at=at: read_board(at / "board", 1.0).notices,
        }
        for name, read in readers.items():
            limit(ROOM_OF_A_LOG if name == "log" else ROOM)
            found[f"{name}, {kind}"] = told(read)
    return found


def http(port: int) -> dict[str, str]:
    """Run the scraper and the load generator on each kind of response."""
    load_client.CONNECT_SECONDS = 2.0
    limit(ROOM_OF_ALL)
    work = Workload(input_tokens_p95=20, output_tokens_p95=4, prefix_reuse=0.0, concurrency=2)

    def scrape(kind: str) -> str:
        scraper = Scraper(f"http://127.0.0.1:{port}/{kind}", 2.0)
        return " & ".join((told(lambda: scraper.sample(1.0)), told(scraper.metrics_text)))

    def load(kind: str) -> str:
        url = f"http://127.0.0.1:{port}/{kind}"
        return told(lambda: run_load_sync(url, None, work, 4.0, 0.5, allow_remote=False, grace_seconds=1.0).summary())

    jobs = {f"scrape {kind}": (scrape, kind) for kind in KINDS}
    jobs |= {f"load {kind}": (load, kind) for kind in KINDS}
    threading.stack_size(512 << 10)
    with ThreadPoolExecutor(12) as pool:
        found = dict(zip(jobs, pool.map(lambda job: job[0](job[1]), jobs.values()), strict=True))
    load_client.CONNECT_SECONDS = 30.0  # longer timeouts, so that these reach the response
    with ThreadPoolExecutor(3) as pool:
        answers = pool.map(load, [f"then-{kind}" for kind in THEN])
        return found | {f"load then-{kind}": answer for kind, answer in zip(THEN, answers, strict=True)}


if __name__ == "__main__":
    told_all = http(int(sys.argv[2])) if sys.argv[1] == "--http" else files(Path(sys.argv[1]))
    json.dump(told_all, sys.stdout)
    sys.stdout.flush()
    os._exit(0)
