"""``vllm-console models``: the models on this machine, and whether a preset's plan fits with each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.launch_arguments import gpus_from
from vllm_console.cli.options import add_json
from vllm_console.cli.output import Document, complain, fields, print_json
from vllm_console.fleet.snapshot import LaunchRequest
from vllm_console.fleet.verbs import FleetError, NotFoundError
from vllm_console.model_text import COLUMNS, fit_text, model_cells
from vllm_console.text import plain

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_launchers.plan.model import Fit
    from vllm_launchers.vllm.modelfacts.local import LocalModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--fits", metavar="PRESET", help="plan each model with this preset and say whether it fits")
    parser.add_argument("--gpus", metavar="auto|0,1|none", help="GPUs to plan for (default: the best free set)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List them; folders that could not be read are reported on stderr."""
    fleet = open_fleet(args, observe=False)
    found = fleet.models()
    for problem in found.problems:
        complain(problem)
    fits = _fits(fleet, args, [one.model for one in found.models if one.facts is not None]) if args.fits else None
    if args.json:
        print_json([model_document(one, fits) for one in found.models])
        return 0
    if not found.models:
        print("No model found in the Hugging Face cache; name folders with models in the settings.")
        return 0
    names = max(len(plain(one.model)) for one in found.models) + 2
    heading = f"{'MODEL':<{names}}" + "".join(f"{title:<{width}}" for title, width in COLUMNS)
    print((heading + ("FITS" if fits is not None else "")).rstrip())
    for one in found.models:
        cells = "".join(f"{cell:<{width}}" for cell, (_, width) in zip(model_cells(one), COLUMNS, strict=True))
        fit = fit_text(fits.get(one.model)) if fits is not None else ""
        print(f"{plain(one.model):<{names}}{plain(cells + fit)}".rstrip())
        reason = one.problem or (fits[one.model].error if fits is not None and one.model in fits else "")
        if reason:
            print(plain(f"  {reason}"))
    return 0


def _fits(fleet: LocalFleet, args: argparse.Namespace, models: list[str]) -> dict[str, Fit]:
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
            plan = fleet.plan(LaunchRequest(args.fits, model=model, gpus=gpus_from(args.gpus), place=place))
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
        document |= {"fits": fit.fits, "fits_error": fit.error or None, "kv_tokens": fit.kv_tokens}
    return document
