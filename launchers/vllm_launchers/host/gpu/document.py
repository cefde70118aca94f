"""Reads hosts from files: JSON documents, and the output of ``nvidia-smi topo -m``. Both are fully validated."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from vllm_launchers.engine_model.gpu_models import GpuModel, find_model, is_unified, near_names
from vllm_launchers.host.gpu.host import MOST_GPUS, Gpu, Host, HostError, Link, with_claims
from vllm_launchers.host.gpu.topology import LinkLevel, bandwidth, islands_of, link_level, nvlinks_in
from vllm_launchers.host.gpu.vendors import vendor_of
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.typed_decoding import decode_json

MOST_BYTES = 8 * 1024 * 1024
MOST_HOLDERS = 4096
MOST_TEXT = 4096
_BIG = 1e9
_MOST_COUNTED = 2**64

RECORDED = Path(__file__).parent / "hosts"
"""Hosts shipped with the program."""


def recorded_hosts() -> dict[str, Path]:
    """The shipped hosts, by name."""
    return {path.stem: path for path in sorted(RECORDED.glob("*.json"))}


def encode_host(host: Host) -> dict[str, Any]:
    """The host as plain values for ``json.dump``."""
    document: dict[str, Any] = msgspec.to_builtins(host)
    return document


def read_host(path: Path) -> Host:
    """Read a host document; also accepts the bare name of a shipped host (``8xh100``).

    Raises:
        HostError: it can't be read, is not a host document, or has impossible values; one sentence with the path.
    """
    try:
        if not path.exists() and str(path) in (known := recorded_hosts()):
            path = known[str(path)]
        if not path.is_file():
            what = "is not a file" if path.exists() else "there is no such file"
            raise HostError(f"{path}: {what}; recorded hosts: {', '.join(recorded_hosts())}")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise HostError(f"{path}: can't be read: {os.strerror(error.errno or 0)}") from error
    except ValueError as error:
        raise HostError("the host file's name holds a null character") from error
    try:
        return decode_host(data)
    except HostError as error:
        raise HostError(f"{path}: {error}") from error


def decode_host(data: bytes) -> Host:
    """Read a host document.

    Unknown keys are ignored; missing bandwidths and islands are derived from the links.

    Raises:
        HostError: it is not a host document; one sentence naming the key.
    """
    if len(data) > MOST_BYTES:
        raise HostError(f"larger than {MOST_BYTES // 1024 // 1024} MiB; that is not a host document")
    try:
        host = decode_json(data, Host)
    except msgspec.ValidationError as error:
        raise HostError(f"is not a host document: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HostError(f"is not JSON: {str(error)[:200]}") from error
    host = with_claims(host, {})  # recorded claims have expired
    for problem in _problems(host):
        raise HostError(problem)
    return _complete(host)


def _problems(host: Host) -> Iterator[str]:
    """Impossible values in a document, one sentence each."""
    if len(host.gpus) > MOST_GPUS:
        yield f"names {len(host.gpus)} GPUs; more than {MOST_GPUS} in one machine are not supported"
        return
    yield from _bad_values(host, "")
    indices = [gpu.index for gpu in host.gpus]
    if len(set(indices)) != len(indices) or any(not 0 <= index < 10_000 for index in indices):
        yield "gpus: every GPU needs a unique index, starting at 0"
    for gpu in host.gpus:
        if len(gpu.holders) > MOST_HOLDERS:
            yield f"gpus[{gpu.index}].used_by: names more than {MOST_HOLDERS} processes"
        if gpu.memory_gib is not None and gpu.free_gib is not None and gpu.free_gib > gpu.memory_gib * 1.001:
            yield f"gpus[{gpu.index}].free_gib: {gpu.free_gib} is more than its total memory, {gpu.memory_gib}"
    seen = set()
    for link in host.links:
        pair = frozenset((link.a, link.b))
        if link.a == link.b or not pair <= set(indices):
            yield f"links: {link.a} to {link.b} does not join two GPUs of the document"
        if pair in seen:
            yield f"links: {link.a} to {link.b} is listed twice"
        seen.add(pair)
    members = [index for island in host.islands for index in island]
    if len(set(members)) != len(members) or not set(members) <= set(indices):
        yield "islands: every GPU belongs to one island, and islands hold GPUs of the document only"


def _bad_values(value: Any, where: str) -> Iterator[str]:  # noqa: C901 (one branch per check)
    """Negative, non-finite or absurd numbers and overlong strings anywhere in the document."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        # Only floats are tested for being finite: an integer may be too large for a float.
        if value < -1 or (isinstance(value, float) and not 0 <= value < math.inf):
            yield f"{where}: {str(value)[:20]} is out of range; expected a number from 0"
        elif value > (_MOST_COUNTED if where.endswith(_COUNTERS) else _BIG):
            yield f"{where}: {str(value)[:20]} is out of range"
    elif isinstance(value, str):
        if len(value) > MOST_TEXT:
            yield f"{where}: is longer than {MOST_TEXT} characters"
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _bad_values(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _bad_values(item, f"{where}.{name[:40]}")
    elif value is not None and not isinstance(value, bool):
        for name in value.__struct_fields__:
            yield from _bad_values(getattr(value, name), f"{where}.{name}".lstrip("."))


_COUNTERS = ("_kib", "_mj", "at", "replays", "ecc_corrected", "ecc_uncorrected", "crc", "replay", "recovery")
"""Keys of counters and times, whose numbers have only a counter's upper limit."""


def _complete(host: Host) -> Host:
    """Derive missing values: free memory, bandwidths, islands."""
    gpus = tuple(map(_with_memory, host.gpus))
    known = {gpu.index: gpu for gpu in gpus}
    links = tuple(_with_bandwidth(link, known) for link in host.links)
    indices = sorted(known)
    islands = tuple(tuple(sorted(island)) for island in host.islands) or islands_of(indices, links)
    alone = set(indices) - {index for island in islands for index in island}
    return replace(host, gpus=gpus, links=links, islands=islands + tuple((index,) for index in sorted(alone)))


def _with_memory(gpu: Gpu) -> Gpu:
    total, free, used = gpu.memory_gib, gpu.free_gib, gpu.used_gib
    if total is not None and free is None and used is not None:
        free = round(max(0.0, total - used), 3)
    if total is not None and used is None and free is not None and not is_unified(gpu.name or ""):
        used = round(max(0.0, total - free), 3)
    return replace(gpu, free_gib=free, used_gib=used)


def _with_bandwidth(link: Link, gpus: dict[int, Gpu]) -> Link:
    if link_level(link.kind) is LinkLevel.UNKNOWN or link.bandwidth_gbs is not None:
        return link
    return replace(link, bandwidth_gbs=bandwidth(link.kind, gpus[link.a], gpus[link.b]))


# -- the output of nvidia-smi topo -m: colors, network cards, wrapped lines and merged cells ---------------------------


MOST_MATRIX = 1024 * 1024
"""Maximum bytes of a matrix."""
MOST_PREFIX = 10
"""Maximum number of words that a log may put before each line: times, ranks, quote marks."""

_ESCAPES = lazy_pattern(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")
_MANGLED = lazy_pattern(r"(?:[\ufffd\u241b\u2190?]+|\^\[|#033|\\(?:x1b|u001b|033|e))?\[(?:\d{1,3}(?:;\d{1,3})*)?m")
"""Escape codes whose first character was replaced, spelled out or lost in a paste."""
_CELL = lazy_pattern(r"NVB?\d{1,3}|PIX|PXB|PHB|PSB|NODE|SYS|SOC|X")
_GPU = lazy_pattern(r"GPU(\d{1,3})")
_DEVICE = lazy_pattern(r"(?:GPU|NIC)\d{1,3}|mlx\d\S*|(?:bnxt|hns|ib|rdma|roce|efa|irdma)\S*\d")
_RANGES = lazy_pattern(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")
_TAIL = ("CPU", "NUMA", "Affinity")


class _Matrix(msgspec.Struct):
    """Column names from the heading, and for each GPU its cells and the words after them."""

    columns: list[str]
    rows: dict[int, list[str]] = msgspec.field(default_factory=dict)
    tails: dict[int, list[str]] = msgspec.field(default_factory=dict)


def host_from_topo(text: str, gpu_name: str | None = None, hostname: str = "") -> Host:
    """The host described by a saved matrix. With ``gpu_name``, its GPUs get that model's facts and all memory is free.

    Raises:
        HostError: the text contains no such matrix, or the GPU's name is unknown; one sentence.
    """
    model = _model(gpu_name) if gpu_name else None
    matrix = _read(text)
    indices = [int(_GPU.fullmatch(name)[1]) for name in matrix.columns if _GPU.fullmatch(name)]  # type: ignore[index]
    if len(indices) > MOST_GPUS:
        raise HostError(f"the matrix has {len(indices)} GPUs; more than {MOST_GPUS} in one machine are not supported")
    if missing := [index for index in indices if index not in matrix.rows]:
        raise HostError(f"the matrix has no row for GPU{missing[0]}; save the whole output of 'nvidia-smi topo -m'")
    if len(set(indices)) != len(indices):
        raise HostError("the heading of the matrix names a GPU twice; save the output of 'nvidia-smi topo -m' again")
    gpus = tuple(_gpu(index, matrix.tails.get(index, []), model, gpu_name) for index in indices)
    links = tuple(_links(matrix, indices, {gpu.index: gpu for gpu in gpus}))
    return Host(hostname=hostname, gpus=gpus, links=links, islands=islands_of(indices, links))


def _model(name: str) -> GpuModel:
    model = find_model(name)
    if model is None:
        if (vendor := vendor_of(name)) is not None:
            raise HostError(f"GPU '{name}': {vendor.sentence}")
        near = near_names(name)
        hint = f"did you mean '{near[0]}'?" if near else "give a name such as 'H100' or 'RTX A6000'"
        raise HostError(f"GPU '{name}' is not among the known models; {hint}")
    return model


def _read(text: str) -> _Matrix:
    if len(text) > MOST_MATRIX:
        raise HostError(f"the text is larger than {MOST_MATRIX // 1024} KiB; that is not a topology matrix")
    matrix: _Matrix | None = None
    row: list[str] = []
    for words in _lines(text):
        start = _heading(words)
        if start is not None and (matrix is None or not (matrix.rows or row)):
            matrix, row = _Matrix(_columns(words[start:])), []
            continue
        if matrix is None:
            continue
        if start is not None or words[:1] == ["Legend:"]:
            break
        start = next((i for i, _ in enumerate(words[:MOST_PREFIX]) if _is_row(words[i:])), None)
        if start is not None or not words:
            _keep(matrix, row)
            row = words[start:] if start is not None else []
        elif row:
            row += words  # wrapped by the terminal
        elif not matrix.rows:
            matrix.columns += _columns(words)
    if matrix is None:
        raise HostError("there is no matrix in the text; save the output of 'nvidia-smi topo -m'")
    _keep(matrix, row)
    return matrix


def _lines(text: str) -> Iterator[list[str]]:
    """The words of each line, without escape codes and table rules."""
    for line in _MANGLED.sub("", _ESCAPES.sub("", text)).replace("|", " ").splitlines():
        yield line.split()


def _heading(words: Sequence[str]) -> int | None:
    """Where the column names begin in a heading (device names, then 'CPU Affinity'); None for any other line."""
    start = next((i for i, word in enumerate(words[:MOST_PREFIX]) if word == "GPU0"), None)
    if start is None or start + 1 >= len(words):
        return None
    following = words[start + 1]
    return start if following in _TAIL or _DEVICE.fullmatch(following) else None


def _columns(words: Sequence[str]) -> list[str]:
    names: list[str] = []
    for word in words:
        if word in _TAIL:
            break
        names.append(word)
    return names


def _is_row(words: Sequence[str]) -> bool:
    return len(words) > 1 and _DEVICE.fullmatch(words[0]) is not None and _cells(words[1]) is not None


def _cells(word: str) -> list[str] | None:
    """The link kinds in a word: one, or several if columns ran together; None for any other word."""
    found = _CELL.findall(word)
    return found if found and "".join(found) == word else None


def _keep(matrix: _Matrix, row: list[str]) -> None:
    """Parse a row of the matrix; skip rows of network cards."""
    if not row or not (found := _GPU.fullmatch(row[0])):
        return
    cells: list[str] = []
    words = row[1:]
    while words and len(cells) < len(matrix.columns) and (read := _cells(words[0])) is not None:
        cells += read
        words = words[1:]
    if len(cells) <= max(place for place, name in enumerate(matrix.columns) if _GPU.fullmatch(name)):
        shown = f"'{words[0][:20]}'" if words else "the end of the line"
        raise HostError(f"row {row[0]} of the matrix has {len(cells)} links, then {shown}; expected one per GPU")
    if row[0] in matrix.columns and cells[matrix.columns.index(row[0])] != "X":
        raise HostError(f"row {row[0]} of the matrix does not fit its heading: where it meets itself there is no X")
    matrix.rows.setdefault(int(found[1]), cells)
    matrix.tails.setdefault(int(found[1]), words)


def _gpu(index: int, tail: Sequence[str], model: GpuModel | None, name: str | None) -> Gpu:
    ranges = [word for word in tail if _RANGES.fullmatch(word)]
    node = tail[1] if len(tail) > 1 and tail[0] in ranges else None
    gpu = Gpu(
        index=index,
        name=name,
        cpu_affinity=ranges[0] if ranges else None,
        numa_node=int(node) if node is not None and node.isdecimal() and len(node) < 6 else None,
    )
    if model is None:
        return gpu
    return replace(
        gpu,
        name=model.name,
        memory_gib=model.memory_gib,
        free_gib=model.memory_gib,
        used_gib=0.0,
        used_by=(),
        architecture=model.architecture,
        compute_capability=model.compute_capability,
        pcie_generation_max=model.pcie_generation,
        pcie_width=16,
        pcie_width_max=16,
    )


def _links(matrix: _Matrix, indices: Sequence[int], gpus: dict[int, Gpu]) -> Iterator[Link]:
    """Each pair once; if the two halves of the matrix differ, the farther kind wins."""
    column = {int(found[1]): i for i, name in enumerate(matrix.columns) if (found := _GPU.fullmatch(name))}
    every_pair = []
    for position, a in enumerate(indices):
        for b in indices[position + 1 :]:
            kinds = (matrix.rows[a][column[b]], matrix.rows[b][column[a]])
            every_pair.append((a, b, max(kinds, key=_distance)))
    # Only a switch connects more than four GPUs with equal numbers of links; a cube mesh mixes numbers.
    counts = {nvlinks_in(kind) for _, _, kind in every_pair}
    switched = len(counts) == 1 and counts != {0} and len(indices) > 4
    for a, b, kind in every_pair:
        known = True if switched else (False if nvlinks_in(kind) else None)
        yield Link(a, b, kind, bandwidth(kind, gpus[a], gpus[b]), switch=known)


def _distance(kind: str) -> tuple[LinkLevel, int]:
    return link_level(kind), -nvlinks_in(kind)
