"""Tables of ``models``: with 80 columns, no row wraps and no name is cut, so that names can be copied."""

from __future__ import annotations

import pytest

from vllm_console.cli.models import FITS, _name, _name_width, where_they_fit
from vllm_console.cli.output import prose
from vllm_console.model_text import COLUMNS
from vllm_launchers.plan.model import MemoryFit

LONG = "some-organization/A-Very-Long-Model-Name-For-A-Narrow-Terminal-Instruct-GPTQ-Int4"


@pytest.mark.parametrize("fits", [0, FITS])
@pytest.mark.parametrize("model", ["org/tiny", LONG, "org/evil\x1b[2J"])
def test_rows_fit_80_columns_with_whole_names(model, fits):
    taken = sum(width for _, width in COLUMNS) + fits
    width = _name_width([model, "org/other"], taken)
    assert width + taken <= 80
    first, *rest = _name(model, width).split("\n")
    assert first.rstrip() == model.partition("\x1b")[0]
    assert (rest or [first]) == [f"{first if not rest else '':<{width}}"]


def test_text_is_wrapped_between_words_without_escape_codes():
    text = prose("  ! " + "word " * 40 + "--trust-remote-code\x1b[2J", "    ")
    assert all(len(line) <= 79 for line in text.splitlines())
    assert text.splitlines()[1].startswith("    word")
    assert "\x1b" not in text


def test_placement_summary_omits_models_that_cannot_start():
    fits = {"org/eight": MemoryFit(True, "", 1000, (0,)), "org/old": MemoryFit(True, "a dropped format", 1000, (0,))}
    assert where_they_fit([*fits.items(), ("org/large", MemoryFit(False)), ("org/new", None)]) == "On GPU 0: eight."
