"""Regular expressions that are compiled on first use.

Compiling takes 0.1 to 1 ms each. A command, or the console's first frame, imports many modules but uses few of their
patterns.
"""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast


def lazy_pattern(source: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """`re.compile`, deferred until first use; for patterns at module level.

    The result has the attributes of a compiled pattern but is not an instance of ``re.Pattern``: call its methods, and
    don't pass it to functions of ``re``.
    """
    return cast("re.Pattern[AnyStr]", _LazyPattern(source, flags))


class _LazyPattern:
    def __init__(self, source: str | bytes, flags: int) -> None:
        self._source, self._flags = source, flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # `copy` asks for these before the two attributes above exist
        # Called only for missing attributes. The result becomes an attribute, so that later uses cost nothing more.
        found = getattr(re.compile(self._source, self._flags), name)
        setattr(self, name, found)
        return found
