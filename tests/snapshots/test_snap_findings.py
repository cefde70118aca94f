"""Screenshots of findings, fixes and startups at three sizes."""

from __future__ import annotations

import pytest

SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}")


@SIZES
def test_pressure(snap_compare, app, pressing, fakes, size):
    servers = (fakes.pressed, fakes.calm, fakes.loading)
    assert snap_compare(app(*servers), terminal_size=size, run_before=pressing())


@SIZES
def test_fix_staged(snap_compare, app, pressing, fakes, size):
    servers = (fakes.pressed, fakes.calm, fakes.loading)
    assert snap_compare(app(*servers), terminal_size=size, run_before=pressing("f"))


def test_pressure_in_ascii(snap_compare, app, pressing, fakes):
    servers = (fakes.calm, fakes.pressed)
    assert snap_compare(app(*servers, ascii=True), terminal_size=(80, 24), run_before=pressing("j"))


def test_pressure_without_color(snap_compare, app, pressing, fakes, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    servers = (fakes.pressed, fakes.calm)
    assert snap_compare(app(*servers), terminal_size=(120, 40), run_before=pressing())


@SIZES
def test_healthy(snap_compare, app, pressing, fakes, size):
    assert snap_compare(app(fakes.calm, fakes.pressed), terminal_size=size, run_before=pressing())


@SIZES
def test_failed_with_a_cause(snap_compare, app, pressing, fakes, size):
    assert snap_compare(app(fakes.diagnosed, fakes.calm), terminal_size=size, run_before=pressing())


@SIZES
def test_starting(snap_compare, app, pressing, fakes, size):
    assert snap_compare(app(fakes.loading, fakes.silent), terminal_size=size, run_before=pressing())


def test_why_it_failed(snap_compare, app, pressing, fakes):
    assert snap_compare(app(fakes.diagnosed), terminal_size=(80, 24), run_before=pressing("i"))
