"""All readers of external bytes, with valid input and their one-sentence errors.

The tests in this folder and ``guided.py`` use this table.
"""

from __future__ import annotations

import functools
import json
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from vllm_console.alerts.notifier import FindingsLog
from vllm_console.diagnosis.failure.diagnose import diagnose
from vllm_console.history import encoding
from vllm_console.load.client import LoadError, StreamedAnswer, target_in
from vllm_console.load.events import AnswerError, message_of
from vllm_console.load.report import Tally
from vllm_console.logs.access import fold
from vllm_console.logs.file import make_line
from vllm_console.logs.startup import stages
from vllm_console.metrics.parse import NotMetricsError, Parser
from vllm_console.metrics.scrape import ScrapeError, Scraper
from vllm_console.settings import ConfigError, read_settings
from vllm_console.text import plain
from vllm_launchers.host.board import BoardError, parse_claims
from vllm_launchers.host.gpu.document import decode_host, host_from_topo, recorded_hosts
from vllm_launchers.host.gpu.host import HostError
from vllm_launchers.host.gpu.topology import links_summary
from vllm_launchers.host.processes import server_command
from vllm_launchers.keeper import client, wire
from vllm_launchers.keeper.errors import KeeperError, RecordError
from vllm_launchers.keeper.lifecycle import ConsoleRequest
from vllm_launchers.keeper.loop import Keeper
from vllm_launchers.launch.details import Details, unpack
from vllm_launchers.plan.budget.engine_report import learned_from, read_report
from vllm_launchers.presets.load import read_presets
from vllm_launchers.secrets import redact, redact_argv
from vllm_launchers.vllm.modelfacts.facts import ModelFactsError
from vllm_launchers.vllm.modelfacts.read import model_facts
from vllm_launchers.vllm.modelfacts.weights import parse_index
from vllm_launchers.vllm.startup_reports import StartupReportStore

TEXTS = (
    "\x1b]52;c;AAAA\x07",
    "\x1b]8;;http://x\x1b\\link",
    "\x1b[2J\x1b[31m",
    "\x9b31m\x9d0;t\x9c",
    "\u202egnp.exe",
    "a\u200bb\U000e0041",
    "[bold red]x[/]",
    "$(touch x);`id`|&&'\"\\",
    "../../../etc/passwd",
    "a\nb\r\x00\x85\u2028",
    "\ud800",
    "٣",
    "-" * 300,
)
BYTES = (
    b"",
    b"\x00" * 100,
    b"\xff\xfe\x80",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"message":' + b"[" * 100_000,
    b"[" * 900 + b"]" * 900,
    b"9" * 5000,
    b'{"version": ' + b"9" * 5000 + b"}",
    b'{"x": NaN, "y": Infinity, "z": -Infinity, "w": 1e999}',
    b'{"a": 1, "a": 2, "a": {}}',
    b'{"name": "\\ud800"}',
    b'"' + b"x" * 1_000_000,
    b"{" + b",".join(b'"%d": 0' % n for n in range(20_000)) + b"}",
    b"a = " + b"[" * 50_000,
    b"a.b = " + b"9" * 5000,
    b"[[" * 20_000 + b"]]" * 20_000,
    b"null",
    b"[]",
    b"1e999999999",
    b"\xef\xbb\xbf{}",
    b"INFO 11-20 11:53:24 [u.py:1] non-default args: {'seed': 007, 'max_num_seqs': " + b"9" * 400 + b", 'x': <o>}\n"
    b"Traceback (most recent call last):\nValueError: To serve at least one request with the models's max seq len (1)",
)
"""Deep nesting, numbers longer than Python reads, NaN and infinity, duplicate keys, lone surrogates, one long line, and
arguments that are no Python literals."""

METRICS = b"""# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.5
"""
LOG = b"""INFO 11-20 11:53:22 [api_server.py:1289] vLLM API server version 0.33.0
INFO 11-20 11:53:24 [utils.py:233] non-default args: {'model': 'm', 'api_key': ['k'], 'max_model_len': 4096}
(EngineCore pid=12) INFO 11-20 11:53:30 [kv_cache_utils.py:864] GPU KV cache size: 441,024 tokens
Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.2s/it]\r
{"levelname": "ERROR", "processName": "EngineCore", "message": "x", "exc_info": "Traceback"}
ERROR 11-20 11:54:00 [core.py:1] ValueError: To serve at least one request with the models's max seq len (131072)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB
"""
TOPO = b"""\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\t0-31\t0
GPU1\tNV4\t X \t0-31\t0
"""
CONFIG = (
    b'{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, '
    b'"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000, "torch_dtype": "bfloat16", '
    b'"max_position_embeddings": 4096, "rope_scaling": {"factor": 2.0}, "quantization_config": {"bits": 4}}'
)
INDEX = b'{"metadata": {"total_size": 12}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}'
RECORD = (
    b'{"name": "one", "state": "stopped", "state_since": 1.0, "created_at": 1.0, "version": 1, "generations": [{'
    b'"number": 1, "started_at": 1.0, "spec": {"argv": ["vllm"], "host": "127.0.0.1", "port": 8000, "details": {}}}]}'
)
STREAM = (
    b'data: {"choices": [{"text": "a", "finish_reason": null}], "usage": {"completion_tokens": 1}}\n\ndata: [DONE]\n\n'
)
TOML = b'read_only = true\nrefresh_seconds = 2\nkeys = { restart = "R" }\n[shares]\n0 = "24 GiB"\n[alerts]\nwebhook = "https://x.example/h"\n'
REPORTS = (
    b'{"version": 1, "entries": [{"model": "m", "gpu": "g", "engine": "e", "flags": "f", "shares": "s", "at": 1, '
    b'"reported": {"kv_tokens": 9000, "kv_gib": 1.5}, "predicted": {"kv_gib": 1.4}}]}'
)
MODELS = b'{"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]}'
HTTP = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n4\r\na 1\n\r\n0\r\n\r\n"
BOARD = (
    b'{"version": 1, "claims": [{"gpus": [2], "since": "2026-01-01T12:41:07Z", "until": "2026-01-01T18:00:00Z", '
    b'"why": "training"}], "servers": [{"name": "chat", "preset": "chatbot", "model": "m", "engine": "0.33.0", '
    b'"gpus": [0], "port": 8000, "since": "2026-01-01T12:41:07Z", "pid": 12, "start_time": 34}]}'
)
ANSWER = b'{"record": ' + RECORD + b"}"
REQUEST = b'{"do": "restart", "spec": {"argv": ["vllm"], "host": "127.0.0.1", "port": 8000}, "secrets": {}}'
PRESET = b'extends = "chatbot"\nmodel = "m"\n[flags]\ndtype = "bfloat16"\n'


def in_a_folder(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Turn a reader of a file into a reader of bytes."""

    def of_bytes(data: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, name).write_bytes(data)
            return read(Path(folder))

    return of_bytes


def metrics(data: bytes) -> object:
    parser = Parser(max_series=500)
    sample = None
    for text in (data.decode(errors="replace"), METRICS.decode(), data.decode("latin-1")):
        try:
            sample = parser.parse(text, 1.0)
        except NotMetricsError:
            continue
        base = encoding.Base(encoding.shape_of(sample), encoding.numbers_of(sample))
        encoding.decode_row(
            encoding.decode_base(encoding.encode_base(base)), 1.0, encoding.encode_row(base, base.numbers)
        )
    assert sample is not None, "the good page among them was read"
    return sample


def log(data: bytes) -> object:
    text = data.decode(errors="surrogateescape")
    stages(text.split("\n"), 1.79e9, 1.79e9 + 60, None, False)
    read_report(text.split("\n"))
    line = make_line(0, data[:300_000], redact)
    assert line.text.isprintable()
    lines = [make_line(at, raw, redact) for at, raw in enumerate(data.splitlines(keepends=True)[:200])]
    assert len(fold(lines, whole=True)) <= len(lines)
    return diagnose(text.split("\n")[:2000], 1)


def stream(data: bytes) -> object:
    answer = StreamedAnswer(Tally())
    for at in range(0, min(len(data), 300_000), 50_000):
        answer.feed(data[at : at + 50_000], 1.0)
    answer.end()
    return message_of(data)


def error_body(data: bytes) -> object:
    assert plain(message_of(data)) == message_of(data)
    return None


def packed_row(data: bytes) -> object:
    sample = Parser().parse(METRICS.decode(), 1.0)
    base = encoding.Base(encoding.shape_of(sample), encoding.numbers_of(sample))
    encoding.decode_row(base, 1.0, data)
    return encoding.decode_base(data)


def process(data: bytes) -> object:
    words = data[:100_000].decode(errors="surrogateescape").split("\0")
    server_command(words)
    server_command(["vllm", "serve", *words])
    return redact_argv(words)


def reports(folder: Path) -> object:
    entries = StartupReportStore(folder / "r.json").entries()
    return [learned_from(entry.reported, entry.predicted) for entry in entries]


def details(data: bytes) -> object:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None  # the record that contains them was invalid
    assert isinstance(unpack(document if isinstance(document, dict) else {}), Details)
    return document


def http_answer(data: bytes) -> object:
    """A response over an existing connection (the scraper's own), so that no port is needed."""
    for ask in (lambda one: one.sample(1.0), lambda one: one.metrics_text()):
        scraper = Scraper("http://127.0.0.1:9")
        near, far = socket.socketpair()
        with far:
            scraper._connection.sock = near
            far.sendall(data[:100_000])
            far.shutdown(socket.SHUT_WR)
            message = ""
            try:
                ask(scraper)
            except ScrapeError as error:
                message = str(error)
            finally:
                scraper.close()
            assert plain(message) == message
    return None


@functools.cache
def keeper_that_answers() -> tuple[Path, list[bytes]]:
    """A folder whose keeper responds to every request with the bytes in the list."""
    folder, says = Path(tempfile.mkdtemp()), [b""]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / wire.SOCKET))
    listener.listen()

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                try:
                    connection.sendall(says[0])
                except OSError:
                    continue  # the console has closed the connection

    threading.Thread(target=serve, daemon=True).start()
    return folder, says


def keeper_answer(data: bytes) -> object:
    folder, says = keeper_that_answers()
    says[0] = data.replace(b"\n", b" ") + b"\n"
    return client._ask(folder, {"do": "read"})


@functools.cache
def keeper_that_listens() -> tuple[Path, list[object]]:
    """A folder with a keeper's own listener, and the faults that it reported."""
    folder, faults = Path(tempfile.mkdtemp()), []
    records = SimpleNamespace(reported=lambda: wire.loads(RECORD))
    nothing = {name: lambda *_: None for name in ("stop", "restart", "cancel_restart")}
    server = SimpleNamespace(**nothing, record_writer=records)
    keeper = SimpleNamespace(supervisor=server, _forget=lambda: None)

    def post(event: object) -> None:
        if isinstance(event, ConsoleRequest):
            Keeper._asked(keeper, event)
        else:
            faults.append(event)

    wire.RequestListener(folder, post).start()
    return folder, faults


def keeper_request(data: bytes) -> object:
    folder, faults = keeper_that_listens()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(folder / wire.SOCKET))
        connection.sendall(data.replace(b"\n", b" ") + b"\n")
        answer = connection.recv(1 << 16)
    assert faults == []
    return json.loads(answer) if answer else None


class Reader(NamedTuple):
    """A reader of external bytes, with valid input, its known keys, and its one-sentence errors."""

    read: Callable[[bytes], object]
    good: bytes
    keys: tuple[str, ...] = ()
    errors: tuple[type[Exception], ...] = ()


READERS = {
    "metrics page": Reader(metrics, METRICS),
    "log": Reader(log, LOG, ("message", "levelname", "processName", "exc_info")),
    "answer stream": Reader(stream, STREAM, ("choices", "usage", "error"), (AnswerError,)),
    "error body": Reader(error_body, b'{"error": {"message": "no"}}', ("error", "message", "detail")),
    "history row": Reader(packed_row, b"\x78\x9c\x03\x00", (), (encoding.EncodingError,)),
    "config file": Reader(in_a_folder("c.toml", lambda at: read_settings(at / "c.toml")), TOML, (), (ConfigError,)),
    "preset": Reader(in_a_folder("mine.toml", read_presets), PRESET),
    "host document": Reader(
        decode_host, recorded_hosts()["1xa100-mig"].read_bytes(), ("hostname", "gpus", "links", "index"), (HostError,)
    ),
    "topology": Reader(
        lambda data: links_summary(host_from_topo(data.decode(errors="replace"))), TOPO, (), (HostError,)
    ),
    "model config": Reader(
        in_a_folder("config.json", lambda at: model_facts(str(at))),
        CONFIG,
        ("hidden_size", "num_attention_heads", "num_hidden_layers", "text_config", "quantization_config", "head_dim",
         "num_local_experts", "layer_types", "sliding_window", "rope_scaling", "torch_dtype", "architectures"),
        (ModelFactsError,),
    ),
    "mistral params": Reader(
        in_a_folder("params.json", lambda at: model_facts(str(at))),
        b'{"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 100}',
        ("dim", "n_layers", "n_heads", "moe", "vocab_size", "head_dim"),
        (ModelFactsError,),
    ),
    "weights' index": Reader(
        lambda data: parse_index(data, "x"), INDEX, ("metadata", "weight_map", "total_size"), (ModelFactsError,)
    ),
    "keeper's record": Reader(
        wire.loads, RECORD, ("name", "state", "generations", "version", "spec", "argv", "exit"), (RecordError,)
    ),
    "details of a record": Reader(details, b'{"preset": "x", "flags": {}}', ("preset", "engine", "flags")),
    "startup reports": Reader(in_a_folder("r.json", reports), REPORTS, ("version", "entries")),
    "findings": Reader(in_a_folder("findings.log", lambda at: list(FindingsLog(at).read())), b'{"at": 1}\n', ("at",)),
    "models answer": Reader(
        lambda data: target_in(data, None, "http://x"), MODELS, ("data", "id", "max_model_len", "error"), (LoadError,)
    ),
    "HTTP answer": Reader(http_answer, HTTP),
    "keeper's answer": Reader(keeper_answer, ANSWER, ("record", "error", "message", "gone"), (KeeperError,)),
    "keeper's request": Reader(keeper_request, REQUEST, ("do", "spec", "argv", "secrets", "restart", "host", "port")),
    "board page": Reader(
        lambda data: parse_claims(data, 1.767e9),
        BOARD,
        ("claims", "servers", "gpus", "since", "until", "why"),
        (BoardError,),
    ),
    "process": Reader(process, b"vllm\0serve\0m\0--port\x008000\0--api-key\0k"),
}  # fmt: skip


def try_(reader: Reader, data: bytes) -> None:
    """Read it; an error must be one of the reader's own, with a short message that does not repeat the input."""
    message = ""
    try:
        reader.read(data)
    except reader.errors as error:
        message = str(error)
    assert len(message) < 3000
