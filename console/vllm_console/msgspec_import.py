"""Imports msgspec without typing_extensions, which takes a fifth of the time of importing the recorder.

msgspec needs three names from it that ``typing`` has since Python 3.11, and uses those if it is not installed. Every
server has a recorder and every command waits for its imports, so they import this module before msgspec.
"""

from __future__ import annotations

import importlib
import sys

_UNWANTED = "typing_extensions"

if _UNWANTED not in sys.modules:
    sys.modules[_UNWANTED] = None  # type: ignore[assignment] # importing it raises ImportError
    try:
        importlib.import_module("msgspec")
    finally:
        del sys.modules[_UNWANTED]
