"""``--picture`` and its related options, for the console and the demo."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.ui.screen_names import SCREENS

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_console.fleet.types import Replay


SIZE = "120x40"


def add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="save a picture (.svg or .png) instead of opening the console"
    )
    parser.add_argument("--screen", choices=SCREENS, metavar="NAME", help=f"screen to show: {', '.join(SCREENS)}")
    parser.add_argument("--server", metavar="NAME", help="server under the cursor (default: the first)")
    parser.add_argument("--size", metavar="COLSxROWS", help=f"size of the picture (default {SIZE})")
    parser.add_argument("--keys", metavar="K,K", help="keys to press before the picture, e.g. e or n,down")


def check_picture_options(args: argparse.Namespace) -> None:
    """Check that a picture can be taken, before servers are started for it.

    Raises:
        UsageError: its name or size is wrong, or PNG is not available.
    """
    from vllm_console.ui.picture import check_picture
    from vllm_console.ui.screenshot import size_of

    check_picture(args.picture)
    size_of(args.size or SIZE)


def write_picture(
    fleet: LocalFleet,
    args: argparse.Namespace,
    *,
    demo: bool = False,
    hints: Path | None = None,
    after: float = 0.0,
    replay: Replay | None = None,
) -> int:
    """Take the requested picture, and print its path."""
    from vllm_console.ui.screenshot import Shot, take_picture

    shot = Shot(
        path=args.picture,
        screen=args.screen or "overview",
        size=args.size or SIZE,
        server=args.server or "",
        at=args.at,
        after=after,
        keys=[key for key in (args.keys or "").split(",") if key],
        demo=demo,
        hints=hints,
        replay=replay,
    )
    print(f"{take_picture(fleet, shot)} saved")
    return 0
