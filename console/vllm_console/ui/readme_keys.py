"""Writes the table of keys into a README: ``python -m vllm_console.ui.readme_keys README.md``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from vllm_console.ui.actions import keys_markdown

_PLACE = re.compile(r"(?<=<!-- keys -->\n).*?(?=<!-- /keys -->)", re.DOTALL)


def with_keys(text: str) -> str:
    """The text with the present table between its two markers."""
    return _PLACE.sub(lambda _: keys_markdown(), text)


if __name__ == "__main__":
    readme = Path(sys.argv[1])
    readme.write_text(with_keys(readme.read_text(encoding="utf-8")), encoding="utf-8")
