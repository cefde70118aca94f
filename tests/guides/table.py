"""All claims by topic: the content of ``docs/guides.md``."""

from __future__ import annotations

from guides import memory, parallelism, scheduling

TOPICS = {"memory": memory.CLAIMS, "scheduling": scheduling.CLAIMS, "parallelism": parallelism.CLAIMS}
