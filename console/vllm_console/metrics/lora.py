"""``vllm:lora_requests_info``: the LoRA adapters that have requests, which vLLM writes into labels."""

from __future__ import annotations

import re

LORA_INFO = "vllm:lora_requests_info"
_LINE = re.compile(rf"^{LORA_INFO}\{{(.*)\}} ([0-9.eE+]+)\s*$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def adapters_with_requests(body: str) -> frozenset[str] | None:
    """The adapters that had requests at the newest step; None if the server reports none.

    The gauge's value is when it was written (Unix seconds), and each set of names is a series of its own: the newest
    counts. vLLM 0.32 names an adapter in both labels, running and waiting, as soon as it has either, so the labels do
    not tell them apart.
    """
    found = max(((float(value), labels) for labels, value in _LINE.findall(body) if _is_number(value)), default=None)
    if found is None:
        return None
    labels = dict(_LABEL.findall(found[1]))
    names = ",".join(labels.get(f"{state}_lora_adapters", "") for state in ("running", "waiting"))
    return frozenset(re.sub(r"\\(.)", r"\1", name) for name in names.split(",") if name)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
