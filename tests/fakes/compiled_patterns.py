"""Imported last by a fork server: compiles regular expressions of imported modules, so that its forks need not."""

import re
import sys

from vllm_launchers.patterns import _LazyPattern

for module in list(sys.modules.values()):
    for value in list(vars(module).values()):
        if isinstance(value, _LazyPattern):
            re.compile(value._source, value._flags)  # `re` caches it
