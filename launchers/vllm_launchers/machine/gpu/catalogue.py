"""What data sheets say of GPUs, for a host that is planned for and not at hand."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Model:
    """A model of GPU. ``memory_gib`` is what NVML reports, a little less than what is printed on the box."""

    name: str
    memory_gib: float
    architecture: str
    compute_capability: str
    pcie_generation: int


_ROWS = (
    ("NVIDIA B200", 179.1, "Blackwell", "10.0", 5),
    ("NVIDIA H200", 140.4, "Hopper", "9.0", 5),
    ("NVIDIA H100 80GB HBM3", 79.6, "Hopper", "9.0", 5),
    ("NVIDIA H100 PCIe", 79.6, "Hopper", "9.0", 5),
    ("NVIDIA H100 NVL", 93.6, "Hopper", "9.0", 5),
    ("NVIDIA A100-SXM4-80GB", 80.0, "Ampere", "8.0", 4),
    ("NVIDIA A100 80GB PCIe", 80.0, "Ampere", "8.0", 4),
    ("NVIDIA A100-SXM4-40GB", 40.0, "Ampere", "8.0", 4),
    ("NVIDIA A40", 45.0, "Ampere", "8.6", 4),
    ("NVIDIA A30", 24.0, "Ampere", "8.0", 4),
    ("NVIDIA A10", 22.5, "Ampere", "8.6", 4),
    ("NVIDIA RTX A6000", 48.0, "Ampere", "8.6", 4),
    ("NVIDIA RTX A5000", 24.0, "Ampere", "8.6", 4),
    ("NVIDIA RTX 6000 Ada Generation", 48.0, "Ada", "8.9", 4),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.6, "Blackwell", "12.0", 5),
    ("NVIDIA L40S", 45.0, "Ada", "8.9", 4),
    ("NVIDIA L40", 45.0, "Ada", "8.9", 4),
    ("NVIDIA L4", 22.5, "Ada", "8.9", 4),
    ("NVIDIA GeForce RTX 5090", 31.8, "Blackwell", "12.0", 5),
    ("NVIDIA GeForce RTX 4090", 24.0, "Ada", "8.9", 4),
    ("NVIDIA GeForce RTX 3090", 24.0, "Ampere", "8.6", 4),
    ("NVIDIA GeForce RTX 3090 Ti", 24.0, "Ampere", "8.6", 4),
    ("Quadro RTX 8000", 45.0, "Turing", "7.5", 3),
    ("Tesla V100-SXM2-32GB", 32.0, "Volta", "7.0", 3),
    ("Tesla V100-SXM2-16GB", 16.0, "Volta", "7.0", 3),
    ("Tesla T4", 15.0, "Turing", "7.5", 3),
    ("Tesla P100-SXM2-16GB", 16.0, "Pascal", "6.0", 3),
    ("NVIDIA B300", 268.6, "Blackwell", "10.3", 6),
    ("NVIDIA GB200", 184.3, "Blackwell", "10.0", 5),
    ("NVIDIA GB10", 121.6, "Blackwell", "12.1", 5),
    ("NVIDIA GH200 480GB", 95.6, "Hopper", "9.0", 5),
    ("NVIDIA H20", 95.6, "Hopper", "9.0", 5),
    ("NVIDIA A100-PCIE-40GB", 40.0, "Ampere", "8.0", 4),
    ("NVIDIA L20", 45.0, "Ada", "8.9", 4),
    ("NVIDIA A10G", 22.5, "Ampere", "8.6", 4),
    ("NVIDIA A16", 15.0, "Ampere", "8.6", 4),
    ("NVIDIA A2", 15.0, "Ampere", "8.6", 4),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6, "Blackwell", "12.0", 5),
    ("NVIDIA RTX PRO 5000 Blackwell", 47.8, "Blackwell", "12.0", 5),
    ("NVIDIA RTX PRO 4000 Blackwell", 23.9, "Blackwell", "12.0", 5),
    ("NVIDIA RTX 5000 Ada Generation", 32.0, "Ada", "8.9", 4),
    ("NVIDIA RTX 4000 Ada Generation", 20.0, "Ada", "8.9", 4),
    ("NVIDIA RTX A4000", 16.0, "Ampere", "8.6", 4),
    ("NVIDIA GeForce RTX 5080", 15.9, "Blackwell", "12.0", 5),
    ("NVIDIA GeForce RTX 5070 Ti", 15.9, "Blackwell", "12.0", 5),
    ("NVIDIA GeForce RTX 5070", 11.9, "Blackwell", "12.0", 5),
    ("NVIDIA GeForce RTX 5060 Ti 16GB", 15.9, "Blackwell", "12.0", 5),
    ("NVIDIA GeForce RTX 4080", 16.0, "Ada", "8.9", 4),
    ("NVIDIA GeForce RTX 4080 SUPER", 16.0, "Ada", "8.9", 4),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", 16.0, "Ada", "8.9", 4),
    ("NVIDIA GeForce RTX 4070", 12.0, "Ada", "8.9", 4),
    ("NVIDIA GeForce RTX 4060 Ti 16GB", 16.0, "Ada", "8.9", 4),
    ("NVIDIA GeForce RTX 4060", 8.0, "Ada", "8.9", 4),
    ("NVIDIA GeForce RTX 3080", 10.0, "Ampere", "8.6", 4),
    ("NVIDIA GeForce RTX 3060", 12.0, "Ampere", "8.6", 4),
    ("NVIDIA GeForce RTX 2080 Ti", 11.0, "Turing", "7.5", 3),
)

MODELS = tuple(Model(*row) for row in _ROWS)


@lru_cache(256)
def find_model(name: str) -> Model | None:
    """The model that a name means: whole (``NVIDIA L40S``) or as people say it (``l40s``, ``H100``, ``rtx 3090``).

    Every word of ``name`` must be one of the model's; of several models the one with the fewest other words is taken,
    the first of the list between equals.
    """
    words = _words(name)
    if not words:
        return None
    fitting = [model for model in MODELS if words <= _words(model.name)]
    return min(fitting, key=lambda model: len(_words(model.name)), default=None)


def near_names(name: str) -> list[str]:
    """Names of models like this one, for a hint."""
    names = [model.name for model in MODELS]
    words = _words(name)
    shared = [known for known in names if words & (_words(known) - {"nvidia", "rtx", "geforce"})]
    return (shared or difflib.get_close_matches(name, names, 3, 0.4))[:3]


def _words(name: str) -> frozenset[str]:
    text = re.sub(r"\b(\d+) gb\b", r"\1gb", name.lower())
    return frozenset(re.findall(r"[a-z0-9]+", text))
