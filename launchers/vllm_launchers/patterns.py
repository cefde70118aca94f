"""Regular expressions that are compiled when they are first used.

Compiling takes 0.1 to 1 ms each. A command or the console's first picture imports many modules, and uses few of their
patterns.
"""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast


def lazy_pattern(source: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """`re.compile`, put off until the first use; for patterns that a module defines.

    What is returned has the attributes of a compiled pattern, but is no instance of ``re.Pattern``: call its methods,
    and don't pass it to functions of ``re``.
    """
    return cast("re.Pattern[AnyStr]", _LazyPattern(source, flags))


class _LazyPattern:
    def __init__(self, source: str | bytes, flags: int) -> None:
        self._source, self._flags = source, flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # as `copy` asks for, before there are the two attributes above
        # Called for what is not an attribute yet: from now on this one is, so that later uses cost nothing more.
        found = getattr(re.compile(self._source, self._flags), name)
        setattr(self, name, found)
        return found
