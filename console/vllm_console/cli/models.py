"""``vllm-console models``: the models on this machine, and whether a preset's plan fits with each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.launch_arguments import gpus_from
from vllm_console.cli.options import add_json, text_from
from vllm_console.cli.output import Document, complain, fields, print_json, prose
from vllm_console.fleet.snapshot import LaunchRequest
from vllm_console.fleet.verbs import FleetError, NotFoundError
from vllm_console.model_text import COLUMNS, fit_text, model_cells
from vllm_console.text import plain

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_launchers.plan.model import Fit
    from vllm_launchers.vllm.modelfacts.local import LocalModel


FITS = 15
"""Columns of a plan's verdict."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "List the models on this machine. 'models get ID' downloads one from the Hugging Face hub and verifies it, "
        "'models remove ID' deletes one from the cache, 'models search WORD…' searches the hub."
    )
    parser.add_argument("verb", nargs="?", choices=["get", "remove", "search"], help="without: list them")
    parser.add_argument("words", nargs="*", metavar="word", help="the model's hub id, or words to search")
    parser.add_argument("--revision", type=text_from, help="get: this branch, tag or commit (default: main)")
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATTERN",
        help="get: only files that match, e.g. '*Q4_K_M.gguf'",
    )
    parser.add_argument(
        "--with-code", action="store_true", help="get: also a model with Python code of its own (trust_remote_code)"
    )
    parser.add_argument("--yes", action="store_true", help="get, remove: without a question")
    parser.add_argument("--fits", metavar="PRESET", help="plan each model with this preset and say whether it fits")
    parser.add_argument("--gpus", metavar="auto|0,1|none", help="GPUs to plan for (default: the best free set)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List them; folders that could not be read are reported on stderr."""
    if args.verb in ("get", "remove"):
        from vllm_console.cli import models_verbs

        return (models_verbs.get_model if args.verb == "get" else models_verbs.remove_model)(args)
    fleet = open_fleet(args, observe=False)
    if args.verb == "search":
        return _search(fleet, args)
    found = fleet.models()
    for problem in found.problems:
        complain(problem)
    fits = _fits(fleet, args, [one.model for one in found.models if one.facts is not None]) if args.fits else None
    if args.json:
        print_json([model_document(one, fits) for one in found.models])
        return 0
    if not found.models:
        print(
            prose(
                "No models in the Hugging Face cache. 'vllm-console models get ID' downloads one; 'models' in "
                "config.toml names folders of your own."
            )
        )
        return 0
    taken = sum(width for _, width in COLUMNS) + (0 if fits is None else FITS)
    names = _name_width([one.model for one in found.models], taken)
    heading = f"{'MODEL':<{names}}" + "".join(f"{title:<{width}}" for title, width in COLUMNS)
    print((heading + ("FITS" if fits is not None else "")).rstrip())
    said: set[str] = set()
    for one in found.models:
        cells = "".join(f"{cell:<{width}}" for cell, (_, width) in zip(model_cells(one), COLUMNS, strict=True))
        fit = fit_text(fits.get(one.model)) if fits is not None else ""
        print(f"{_name(one.model, names)}{plain(cells + fit)}".rstrip())
        reason = one.problem or (fits[one.model].error if fits is not None and one.model in fits else "")
        if reason and reason not in said:
            print(prose(f"  {reason}", "  "))
        said.add(reason)
    return 0


def _search(fleet: LocalFleet, args: argparse.Namespace) -> int:
    """List what the hub finds; with ``--fits`` those that fit first, each planned with its config from the hub."""
    from vllm_console.cli.models_verbs import found_cells, found_models

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
        print(plain(f"The hub finds no model for: {' '.join(args.words)}"))
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
    """The width of the names' column beside so many columns, on a terminal of 80."""
    return max(7, min(max(len(plain(one)) for one in models) + 2, 80 - taken))


def _name(model: str, width: int) -> str:
    """A name in its column; one that is too long stands in a line of its own."""
    text = plain(model)
    return f"{text:<{width}}" if len(text) < width else f"{text}\n{'':<{width}}"


def _fits(fleet: LocalFleet, args: argparse.Namespace, models: list[str], *, ask_hub: bool = False) -> dict[str, Fit]:
    """The plan's verdict by model.

    Raises:
        NotFoundError: there is no such preset.
    """
    from vllm_launchers.plan.model import Fit, fit_of

    presets = [preset.name for preset in fleet.presets()[0]]
    if args.fits not in presets:
        raise NotFoundError(f"no preset is called '{args.fits}'; there are {', '.join(presets)}")
    place = {None: "offered", "auto": "auto"}.get(args.gpus, "")
    fits = {}
    for model in models:
        try:
            plan = fleet.plan(
                LaunchRequest(args.fits, model=model, gpus=gpus_from(args.gpus), place=place, from_hub=ask_hub)
            )
            fits[model] = fit_of(plan)
        except FleetError as error:
            fits[model] = Fit(error=str(error).partition("\n")[0])
    return fits


def model_document(one: LocalModel, fits: Mapping[str, Fit] | None) -> Document:
    """A model as JSON; ``fits`` maps the planned models, None if no plan was requested."""
    from vllm_launchers.plan.model import Fit

    facts = one.facts
    quantization = facts.quantization if facts is not None else None
    document: Document = {
        **fields(one, "model place folder disk_bytes problem"),
        **{name: getattr(facts, name, None) for name in ("architecture", "parameters", "dtype", "max_context")},
        "quantization": quantization.method if quantization is not None else None,
        "quantization_bits": quantization.bits if quantization is not None else None,
    }
    if fits is not None:
        fit = fits.get(one.model, Fit())
        document |= _fit_document(fit)
    return document


def _fit_document(fit: Fit) -> Document:
    return {"fits": fit.fits, "fits_error": fit.error or None, "kv_tokens": fit.kv_tokens}
