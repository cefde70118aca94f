"""One start of a server: its stages, and what made it fast or slow."""

from __future__ import annotations

import msgspec


class Stage(msgspec.Struct, frozen=True):
    """One stage of a startup: name (``process``, ``config``, ``weights``, ``kv cache``, …) and duration in seconds.

    ``seconds`` is None while it runs; ``detail`` is a short figure (``61%``, ``7.6 GiB``).
    """

    name: str
    started_at: float
    seconds: float | None = None
    detail: str = ""

    @property
    def share(self) -> float | None:
        """The fraction in ``detail``, if that ends in a percentage: ``61%`` is 0.61, ``4 of 15 GiB, 28%`` 0.28."""
        text = self.detail.rstrip()
        if not text.endswith("%"):
            return None
        try:
            share = float(text.removesuffix("%").replace(",", " ").split()[-1]) / 100
        except (ValueError, IndexError):
            return None
        return share if 0 <= share <= 1 else None


class StartupFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts of one start; None or empty if its log does not show them.

    ``compile_cache`` is ``hit``, ``partly``, ``new`` (compiled), ``failed`` (compiled because the cached code could not
    be loaded) or ``disabled``; ``compile_seconds`` is the time that torch.compile took with or without it,
    ``weights_seconds`` the time to read weights. ``kv_measure_seconds`` is how long vLLM measured memory after its
    profiling run, which a fixed KV cache size skips; ``kv_pinned`` is what fixed it: ``flag``, or ``plan`` for vLLM's
    own start-up plan. ``prepared_seconds`` were spent while the previous generation served, and ``read_ahead_gib`` of
    ``weights_gib`` were read into the page cache then.
    """

    compile_cache: str = ""
    compile_seconds: float | None = None
    weights_seconds: float | None = None
    kv_measure_seconds: float | None = None
    kv_pinned: str = ""
    prepared_seconds: float | None = None
    read_ahead_gib: float | None = None
    weights_gib: float | None = None
