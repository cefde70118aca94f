"""``vllm-console models``: the models on this machine, and whether they fit with a preset."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import open_fleet, refuse_read_only, settings_from
from vllm_console.cli.options import add_json, gpus_from, place_from, text_from
from vllm_console.cli.output import Document, complain, confirmed, fields, print_json, prose
from vllm_console.cli.progress import ProgressLine
from vllm_console.model_text import COLUMNS, fit_text, model_cells
from vllm_console.text import UNKNOWN, count, plain, size
from vllm_launchers.errors import NotFoundError, OperationError, RefusedError, UsageError
from vllm_launchers.host.gpu.host import gpus_text
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.units import counted

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_launchers.plan.model import MemoryFit
    from vllm_launchers.vllm.hub import FoundModel, Hub, HubModel
    from vllm_launchers.vllm.modelfacts.local import LocalModel


FITS = 15
"""Width of the plan's verdict."""
LAST_USED = 10
"""Width of a date."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "List the models on this machine. 'models get ID' downloads one from the Hugging Face hub and verifies it, "
        "'models remove ID' deletes one from the cache, 'models search WORD…' searches the hub."
    )
    parser.add_argument("verb", nargs="?", choices=["get", "remove", "search"], help="omit to list them")
    parser.add_argument("words", nargs="*", metavar="word", help="hub id of the model, or words to search for")
    parser.add_argument("--revision", type=text_from, help="get: branch, tag or commit (default: main)")
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATTERN",
        help="get: only matching files, e.g. '*Q4_K_M.gguf'",
    )
    parser.add_argument(
        "--with-code", action="store_true", help="get: accept a model with its own Python code (trust_remote_code)"
    )
    parser.add_argument("--yes", action="store_true", help="get, remove: do not ask")
    parser.add_argument("--fits", metavar="PRESET", help="plan each model with this preset and show whether it fits")
    parser.add_argument("--gpus", metavar="auto|0,1|none", help="GPUs to plan for (default: the best free set)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List the models; unreadable folders are reported on stderr."""
    if args.verb in ("get", "remove"):
        return get_model(args) if args.verb == "get" else remove_model(args)
    fleet = open_fleet(args, observe=False)
    if args.verb == "search":
        return _search(fleet, args)
    found = fleet.models()
    for problem in found.problems:
        complain(problem)
    fits = _fits(fleet, args, [one.model for one in found.models if one.facts is not None]) if args.fits else None
    used = _used(fleet)
    if args.json:
        print_json([model_document(one, fits, used) for one in found.models])
        return 0
    if not found.models:
        print(
            prose(
                "No models in the Hugging Face cache. 'vllm-console models get ID' downloads one; 'models' in "
                "config.toml names folders of your own."
            )
        )
        return 0
    taken = sum(width for _, width in COLUMNS) + (FITS if fits is not None else LAST_USED)
    names = _name_width([one.model for one in found.models], taken)
    heading = f"{'MODEL':<{names}}" + "".join(f"{title:<{width}}" for title, width in COLUMNS)
    print((heading + ("FITS" if fits is not None else "LAST USED")).rstrip())
    printed: set[str] = set()
    for one in found.models:
        cells = "".join(f"{cell:<{width}}" for cell, (_, width) in zip(model_cells(one), COLUMNS, strict=True))
        last = fit_text(fits.get(one.model)) if fits is not None else _day(used.get(one.model))
        print(f"{_name(one.model, names)}{plain(cells + last)}".rstrip())
        fit = fits.get(one.model) if fits is not None else None
        reason = one.problem or (fit.error or fit.incomplete if fit is not None else "")
        if reason and reason not in printed:
            print(prose(f"  {reason}", "  "))
        printed.add(reason)
    if fits is not None and (where := where_they_fit([(one.model, fits.get(one.model)) for one in found.models])):
        print(prose(where))
    return 0


def where_they_fit(fits: Iterable[tuple[str, MemoryFit | None]]) -> str:
    """``On GPU 0: eight. On GPUs 0, 1: large.``, each model by the last part of its name.

    Leaves out models that fit nowhere, or cannot start for another reason.
    """
    models: dict[tuple[int, ...], list[str]] = {}
    for model, fit in fits:
        if fit is not None and fit.gpus and not fit.error:
            models.setdefault(fit.gpus, []).append(plain(model.rstrip("/")).rpartition("/")[2])
    return " ".join(f"On {gpus_text(gpus)}: {', '.join(names)}." for gpus, names in sorted(models.items()))


def _used(fleet: LocalFleet) -> Mapping[str, float]:
    """When each model was last started by this program; empty if unreadable."""
    try:
        used: Mapping[str, float] = fleet.history.used_models()
    except OperationError as error:
        complain(str(error))
        return {}
    return used


def _day(at: float | None) -> str:
    return UNKNOWN if at is None else time.strftime("%Y-%m-%d", time.localtime(at))


def _search(fleet: LocalFleet, args: argparse.Namespace) -> int:
    """List what the hub finds. With ``--fits``, plan each with its hub config, and list those that fit first."""

    found = found_models(args)
    fits = _fits(fleet, args, [one.model for one in found], ask_hub=True) if args.fits else None
    if fits is not None:
        order = {True: 0, None: 1, False: 2}
        found = tuple(sorted(found, key=lambda one: order[fits[one.model].fits]))
    if args.json:
        extra = [{} if fits is None else _fit_document(fits[one.model]) for one in found]
        print_json([fields(one, "model downloads tags") | more for one, more in zip(found, extra, strict=True)])
        return 0
    if not found:
        print(plain(f"No models found on the hub for: {' '.join(args.words)}"))
        return 0
    names = _name_width([one.model for one in found], 10 + (0 if fits is None else 2 + FITS))
    print(f"{'MODEL':<{names}}{'DOWNLOADS':>10}{'  FITS' if fits is not None else ''}")
    for one in found:
        fit = f"  {fit_text(fits[one.model])}" if fits is not None else ""
        print(_name(one.model, names) + plain(f"{found_cells(one)}{fit}"))
    for reason in dict.fromkeys(fit.error for fit in (fits or {}).values() if fit.error and fit.fits is not False):
        print(prose(f"  ! {reason}", "    "))
    print("\n'vllm-console models get MODEL' downloads one.")
    return 0


def _name_width(models: list[str], taken: int) -> int:
    """The width of the name column on an 80-column terminal, next to ``taken`` columns."""
    return max(7, min(max(len(plain(one)) for one in models) + 2, 80 - taken))


def _name(model: str, width: int) -> str:
    """A name in its column, or on a line of its own if it is too long."""
    text = plain(model)
    return f"{text:<{width}}" if len(text) < width else f"{text}\n{'':<{width}}"


def _fits(
    fleet: LocalFleet, args: argparse.Namespace, models: list[str], *, ask_hub: bool = False
) -> dict[str, MemoryFit]:
    """The plan's verdict by model. Raises NotFoundError if there is no such preset."""
    from vllm_launchers.plan.model import MemoryFit, fit_of

    fleet.preset(args.fits)
    gpus, place = gpus_from(args.gpus), place_from(args.gpus, "offered")
    fits = {}
    for model in models:
        try:
            plan = fleet.plan(LaunchRequest(args.fits, model=model, gpus=gpus, place=place, from_hub=ask_hub))
            fits[model] = fit_of(plan)
        except OperationError as error:
            fits[model] = MemoryFit(error=str(error).partition("\n")[0])
    return fits


def model_document(one: LocalModel, fits: Mapping[str, MemoryFit] | None, used: Mapping[str, float]) -> Document:
    """A model as JSON. ``fits`` maps the planned models (None if no plan was requested); ``used`` is from `_used`."""
    from vllm_launchers.plan.model import MemoryFit

    facts = one.facts
    quantization = facts.quantization if facts is not None else None
    document: Document = {
        **fields(one, "model place folder disk_bytes problem"),
        **{name: getattr(facts, name, None) for name in ("architecture", "parameters", "dtype", "max_context")},
        "quantization": quantization.method if quantization is not None else None,
        "quantization_bits": quantization.bits if quantization is not None else None,
        "last_used": used.get(one.model),
    }
    if fits is not None:
        fit = fits.get(one.model, MemoryFit())
        document |= _fit_document(fit)
    return document


def _fit_document(fit: MemoryFit) -> Document:
    return {
        "fits": fit.fits,
        "fits_error": fit.error or None,
        "incomplete": fit.incomplete or None,
        "kv_tokens": fit.kv_tokens,
        "gpus": list(fit.gpus),
    }


def get_model(args: argparse.Namespace) -> int:
    """Download a model, or resume its download.

    Raises:
        UsageError: the name is not a hub ID.
        OperationError: it can't be downloaded.
    """
    from vllm_launchers.vllm.model_folder import CONFIGS

    refuse_read_only(args)
    hub, model = _hub(args), _one_word(args)
    found = hub.about(model, args.revision, args.include)
    missing = _admitted(args, hub, found)
    with ProgressLine(silent=args.json or not missing) as line:
        folder = hub.get(found, line.download(missing))
    if args.json:
        print_json(
            {"model": model, "revision": found.commit, "folder": str(folder), "bytes": found.bytes,
             "downloaded_bytes": missing, "code": found.code,
             "files": [fields(one, "name bytes") for one in found.files]}
        )  # fmt: skip
    else:
        print(plain(f"{model}: every file verified, {size(found.bytes)}"))
        if any(one.name in CONFIGS for one in found.files):
            print(plain(f"  vllm-console start PRESET --model {model}"))
        else:
            print(
                "  There is no config.json among these files; without one vLLM needs a plugin that reads their format."
            )
    return 0


def _admitted(args: argparse.Namespace, hub: Hub, found: HubModel) -> int:
    """The number of bytes to download, if there is room and the user agrees.

    Raises:
        OperationError: there is no room.
        RefusedError: it was not confirmed.
    """
    missing, free = hub.missing_bytes(found), hub.free_bytes()
    if not args.json:
        print(plain(found.model))
        print(plain(f"  {counted(len(found.files), 'file')}, {size(found.bytes)}, commit {found.commit[:12]}"))
        print(plain(f"  {size(missing) if missing else 'nothing'} to download, {size(free)} free at {hub.cache}"))
    if problem := hub.no_room(found):
        raise OperationError(problem)
    if found.code and not args.with_code:
        risk = (
            f"{found.model} comes with Python code of its own, which vLLM runs as you if --trust-remote-code is given"
        )
        if not (sys.stdin.isatty() and sys.stdout.isatty() and not args.json):
            raise RefusedError(f"{risk}; downloading does not run it: give --with-code to accept it")
        print(prose(f"  ! {risk}; downloading does not run it.", "    "))
        confirmed(argparse.Namespace(yes=False, json=False), "Download it with its code?")
    if missing:
        confirmed(args, f"Download {size(missing)}?")
    return missing


def remove_model(args: argparse.Namespace) -> int:
    """Delete a model from the cache. Raises OperationError if it can't be deleted."""
    from vllm_launchers.vllm.hub import HubError, users_of_model

    refuse_read_only(args)
    hub, model = _hub(args), _one_word(args)
    try:
        folder = hub.held(model)
    except HubError as error:
        raise UsageError(f"{error}; delete models in your own folders yourself") from error
    if folder is None:
        raise NotFoundError(f"{model} is not in the cache at {hub.cache}")
    if users := users_of_model(model, folder):
        raise RefusedError(f"{model} is served by process {users[0]}; stop its server first")
    confirmed(args, f"Delete {folder}?")
    try:
        freed = hub.remove(folder)
    except OSError as error:
        raise OperationError(f"{error.filename}: {os.strerror(error.errno or 0)}") from error
    if args.json:
        print_json({"model": model, "removed": True, "freed_bytes": freed})
    else:
        print(plain(f"{model}: removed, {size(freed)} freed"))
    return 0


def found_models(args: argparse.Namespace) -> tuple[FoundModel, ...]:
    """The models that the hub finds for the words. Raises OperationError if the hub does not respond."""

    if not args.words:
        raise UsageError("models search: name words to search, such as qwen3 8b awq")
    return _hub(args).search(" ".join(args.words))


def found_cells(one: FoundModel) -> str:
    """The columns of a found model."""
    return f"{count(one.downloads):>10}"


def _hub(args: argparse.Namespace) -> Hub:
    from vllm_launchers.vllm.hub import Hub

    return Hub(settings_from(args).vllm)


def _one_word(args: argparse.Namespace) -> str:
    if len(args.words) != 1:
        raise UsageError(f"models {args.verb}: name one model, such as Qwen/Qwen3-8B-AWQ")
    return str(args.words[0])
