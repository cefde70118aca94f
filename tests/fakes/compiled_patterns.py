"""Imported last by a fork server: compiles the patterns of what it has imported, so that no fork of it has to."""

import re
import sys

from vllm_launchers.patterns import _LazyPattern

for module in list(sys.modules.values()):
    for value in list(vars(module).values()):
        if isinstance(value, _LazyPattern):
            re.compile(value._source, value._flags)  # which `re` keeps
