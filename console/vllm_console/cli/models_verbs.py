"""``models get``, ``models remove`` and ``models search``."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from vllm_console.cli.download_progress import DownloadLine, confirmed
from vllm_console.cli.fleet_access import refuse_read_only, settings_from
from vllm_console.cli.output import fields, print_json, prose
from vllm_console.fleet.verbs import FleetError, NotFoundError, RefusedError, UsageError
from vllm_console.text import count, plain, size
from vllm_launchers.units import counted

if TYPE_CHECKING:
    from vllm_launchers.vllm.hub import FoundModel, Hub, HubModel


def get_model(args: argparse.Namespace) -> int:
    """Download a model, or go on with it.

    Raises:
        UsageError: that is no hub id.
        FleetError: it can't be downloaded.
    """
    from vllm_launchers.vllm.hub import HubError, HubNameError

    refuse_read_only(args)
    hub, model = _hub(args), _one_word(args)
    try:
        found = hub.about(model, args.revision, args.include)
        missing = _admitted(args, hub, found)
        if missing:
            with DownloadLine(missing, silent=args.json) as line:
                folder = hub.get(found, line.show)
        else:
            folder = hub.get(found, lambda _step, _done: None)
    except HubNameError as error:
        raise UsageError(str(error)) from error
    except HubError as error:
        raise FleetError(str(error)) from error
    if args.json:
        print_json(
            {"model": model, "revision": found.commit, "folder": str(folder), "bytes": found.bytes,
             "downloaded_bytes": missing, "code": found.code,
             "files": [fields(one, "name bytes") for one in found.files]}
        )  # fmt: skip
    else:
        print(plain(f"{model}: every file verified, {size(found.bytes)}"))
        print(plain(f"  vllm-console start PRESET --model {model}"))
    return 0


def _admitted(args: argparse.Namespace, hub: Hub, found: HubModel) -> int:
    """What is to be downloaded, if there is room for it and the user agrees.

    Raises:
        FleetError: there is no room.
        RefusedError: nobody agreed.
    """
    missing, free = hub.missing_bytes(found), hub.free_bytes()
    if not args.json:
        print(plain(found.model))
        print(plain(f"  {counted(len(found.files), 'file')}, {size(found.bytes)}, commit {found.commit[:12]}"))
        print(plain(f"  {size(missing) if missing else 'nothing'} to download, {size(free)} free at {hub.cache}"))
    if problem := hub.no_room(found):
        raise FleetError(problem)
    if found.code and not args.with_code:
        risk = (
            f"{found.model} comes with Python code of its own, which vLLM runs as you if --trust-remote-code is given"
        )
        if not (sys.stdin.isatty() and sys.stdout.isatty() and not args.json):
            raise RefusedError(f"{risk}; downloading runs none of it: --with-code says that you want it")
        print(prose(f"  ! {risk}; downloading runs none of it.", "    "))
        confirmed(argparse.Namespace(yes=False, json=False), "Download it with its code?")
    if missing:
        confirmed(args, f"Download {size(missing)}?")
    return missing


def remove_model(args: argparse.Namespace) -> int:
    """Delete a model from the cache.

    Raises:
        FleetError: it can't be deleted.
    """
    from vllm_launchers.vllm.hub import HubError, users_of_model

    refuse_read_only(args)
    hub, model = _hub(args), _one_word(args)
    try:
        folder = hub.held(model)
    except HubError as error:
        raise UsageError(f"{error}; a model in a folder of your own is yours to delete") from error
    if folder is None:
        raise NotFoundError(f"{model} is not in the cache at {hub.cache}")
    if users := users_of_model(model, folder):
        raise RefusedError(f"{model} is served by process {users[0]}; stop its server first")
    confirmed(args, f"Delete {folder}?")
    try:
        freed = hub.remove(folder)
    except OSError as error:
        raise FleetError(f"{error.filename}: {os.strerror(error.errno or 0)}") from error
    if args.json:
        print_json({"model": model, "removed": True, "freed_bytes": freed})
    else:
        print(plain(f"{model}: removed, {size(freed)} freed"))
    return 0


def found_models(args: argparse.Namespace) -> tuple[FoundModel, ...]:
    """What the hub finds for the words.

    Raises:
        FleetError: it does not answer.
    """
    from vllm_launchers.vllm.hub import HubError

    if not args.words:
        raise UsageError("models search: name words to search, such as qwen3 8b awq")
    try:
        return _hub(args).search(" ".join(args.words))
    except HubError as error:
        raise FleetError(str(error)) from error


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
