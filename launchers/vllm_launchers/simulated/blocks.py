"""The KV cache's block pool: reference counts, a prefix cache by hash chain, and LRU eviction of free cached blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class NoFreeBlocksError(Exception):
    """More blocks were asked for than are free."""


def extend_chain(parent: int, tokens: Sequence[int]) -> int:
    """Hash one full block of ``tokens`` behind the chain ``parent``, so that equal hashes mean equal prefixes."""
    return hash((parent, tuple(tokens)))


class BlockPool:
    """Blocks of one KV cache, each free, held by one request, or shared by several through a common prefix.

    ``total`` counts blocks as vLLM reports them; one of them is its null block and never handed out. A freed block
    that carries a hash stays findable until it is needed for something else: the least recently freed goes first.
    """

    def __init__(self, total: int, *, caching: bool) -> None:
        if total < 2:
            raise ValueError(f"a block pool needs at least 2 blocks, got {total}")
        self.total = total
        self.caching = caching
        self._fresh = 0
        self._free: OrderedDict[int, None] = OrderedDict()
        self._references: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        self._by_hash: dict[int, int] = {}

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out."""
        return self.total - 1

    @property
    def used(self) -> int:
        """Blocks that some request holds."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return self.capacity - len(self._references)

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1, as ``vllm:kv_cache_usage_perc`` has it."""
        return len(self._references) / self.capacity

    @property
    def cached(self) -> int:
        """Blocks that can be found by hash, held or free."""
        return len(self._by_hash)

    def references(self, block: int) -> int:
        """How many requests hold ``block``."""
        return self._references.get(block, 0)

    def match(self, hashes: Iterable[int]) -> list[int]:
        """Return the blocks of the longest cached prefix of ``hashes``, without taking them."""
        found: list[int] = []
        if not self.caching:
            return found
        for value in hashes:
            block = self._by_hash.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def free_among(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are free, and so would be taken out of the free ones by :meth:`share`."""
        return sum(1 for block in blocks if block not in self._references)

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each of ``blocks``, which :meth:`match` returned."""
        for block in blocks:
            held = self._references.get(block, 0)
            if not held:
                del self._free[block]
            self._references[block] = held + 1

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks with nothing in them; what they had cached is forgotten.

        Raises :class:`NoFreeBlocksError`, and then takes none.
        """
        if count > self.free:
            raise NoFreeBlocksError(f"{count} blocks wanted, {self.free} free")
        taken: list[int] = []
        for _ in range(count):
            if self._fresh < self.capacity:
                block = self._fresh
                self._fresh += 1
            else:
                block, _nothing = self._free.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def remember(self, block: int, value: int) -> None:
        """Make the held ``block`` findable by its chain hash; the first block with a hash keeps it."""
        if self.caching and value not in self._by_hash and block not in self._hash_of:
            self._by_hash[value] = block
            self._hash_of[block] = value

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference on each block, tails first, so that the ends of prefixes are evicted first."""
        for block in reversed(blocks):
            held = self._references[block]
            if held > 1:
                self._references[block] = held - 1
                continue
            del self._references[block]
            self._free[block] = None

    def _forget(self, block: int) -> None:
        value = self._hash_of.pop(block, None)
        if value is not None:
            del self._by_hash[value]
