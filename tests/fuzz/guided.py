"""Searches for bytes that break a reader, guided by the covered lines and branches (atheris: Linux, CPython).

    python tests/fuzz/guided.py --list
    python tests/fuzz/guided.py "metrics page" --seconds 3600 --seed 7 --folder FOLDER
    python tests/fuzz/guided.py "metrics page" --runs 5000 --seed 7

It continues after a finding: each fault, identified by its kind and location, is kept once with its bytes in
``FOLDER/findings``, and inputs with new coverage are kept in ``FOLDER/corpus`` for the next run. The last line reports
how much was tried. The exit code is 1 if something was found.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import atheris

TESTS = Path(__file__).resolve().parents[1]
SLOW_SECONDS = 5.0
"""CPU seconds for one input; a slower one is a finding."""
LONGEST = 8192
MEMORY_MIB = 2048

sys.path.insert(0, str(TESTS))
with atheris.instrument_imports(include=["vllm_console", "vllm_launchers"], enable_loader_override=False):
    from fuzz.readers import BYTES, READERS, TEXTS, Reader, try_


class Search:
    """A search on one reader: what was tried, and what broke it."""

    def __init__(self, name: str, folder: Path, seconds: float) -> None:
        self.name = name
        self._seconds = seconds or float("inf")
        self.reader: Reader = READERS[name]
        self.findings = folder / "findings"
        self.findings.mkdir(parents=True, exist_ok=True)
        self.tried = 0
        self.found: set[str] = set()
        atexit.register(self.tell)

    def try_one(self, data: bytes) -> None:
        """Try one input. Never raises: a fault is recorded, and the search continues."""
        self.tried += 1
        began = time.thread_time()
        try:
            try_(self.reader, data)
        except Exception as error:  # noqa: BLE001 - any exception is a fault
            self._keep(data, f"{type(error).__name__} at {_place(error)}", "".join(traceback.format_exception(error)))
        if (took := time.thread_time() - began) > SLOW_SECONDS:
            self._keep(data, "slow", f"{took:.1f} s for {len(data)} bytes")
        if self.tried % 100 == 0 and time.process_time() > self._seconds:
            self.tell()
            os._exit(bool(self.found))

    def tell(self) -> None:
        """Print the last line and exit (libFuzzer ends the process itself)."""
        took = time.process_time()
        print(f"{self.name}: {self.tried} tried, {len(self.found)} found, {took:.0f} s of CPU", flush=True)
        if self.found:
            os._exit(1)

    def _keep(self, data: bytes, kind: str, text: str) -> None:
        if kind in self.found:
            return
        self.found.add(kind)
        path = self.findings / f"{self.name.replace(' ', '-')}-{hashlib.sha256(data).hexdigest()[:12]}"
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(f"{kind}\n{text}", errors="backslashreplace")
        print(f"found: {kind}: {path}", file=sys.stderr, flush=True)


def _place(error: Exception) -> str:
    """Where the program broke, without the surrounding tests."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "vllm_" in frame.filename] or frames
    return f"{Path(inside[-1].filename).name}:{inside[-1].lineno}"


def corpus(reader: Reader, folder: Path) -> Path:
    """The initial corpus: valid input and known odd input."""
    place = folder / "corpus"
    place.mkdir(parents=True, exist_ok=True)
    for data in (reader.good, *(some for some in BYTES if len(some) <= LONGEST)):
        (place / hashlib.sha256(data).hexdigest()).write_bytes(data)
    return place


def dictionary(reader: Reader, folder: Path) -> Path:
    """Useful words in libFuzzer's dictionary format."""
    words = [*(key.encode() for key in reader.keys), *(text.encode(errors="surrogatepass") for text in TEXTS)]
    lines = ['"' + "".join(f"\\x{byte:02x}" for byte in word[:60]) + '"' for word in words]
    path = folder / "dictionary"
    path.write_text("\n".join(lines) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reader", nargs="?", choices=list(READERS), metavar="READER")
    parser.add_argument("--list", action="store_true", help="name the readers")
    parser.add_argument("--seconds", type=int, default=0, help="of CPU (default: until stopped)")
    parser.add_argument("--runs", type=int, default=-1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="corpus and findings (default: a new one)")
    args = parser.parse_args()
    if args.list or args.reader is None:
        print("\n".join(READERS))
        return
    folder = args.folder or Path(tempfile.mkdtemp(prefix="vllm-console-fuzz-"))
    search = Search(args.reader, folder, args.seconds)
    options = {
        "atheris_runs": args.runs,
        "seed": args.seed,
        "max_len": LONGEST,
        "rss_limit_mb": MEMORY_MIB,
        "timeout": 60,
        "dict": dictionary(search.reader, folder),
        "artifact_prefix": f"{search.findings}/",
        "verbosity": 0,
    }
    words = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup([sys.argv[0], *words, str(corpus(search.reader, folder))], search.try_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
