"""Screenshots of the panes that show a server's probe records."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("key", ["7", "8"])
def test_requests_and_steps(snap_compare, app, pressing, fakes, size, key):
    assert snap_compare(app(fakes.chat, fakes.coder), terminal_size=size, run_before=pressing(key))


@pytest.mark.parametrize("size", [(60, 15), (200, 60), (200, 20)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("key", ["7", "8"])
def test_requests_and_steps_at_other_sizes(snap_compare, app, pressing, fakes, size, key):
    assert snap_compare(app(fakes.chat, fakes.coder), terminal_size=size, run_before=pressing(key))


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 40), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_what_the_prefix_cache_did(snap_compare, app, pressing, fakes, size):
    keys = pressing("7", *"VVVV")
    assert snap_compare(app(fakes.chat, fakes.coder), terminal_size=size, run_before=keys)
