"""How the rows of an epoch are cut into micro-batches: a pure function of the rows' lengths, the settings and a key.

Rows are shuffled. Without buckets they are sorted by length inside pools, so that little is padding, and cut to the
token budget: nearly every micro-batch then has a shape of its own. With buckets a row is padded to the least bucket
that holds it, and a bucket's micro-batches all have the same number of rows: one shape for each bucket, and one more
for the rows that are left over at the end of an epoch (the same number in every epoch). In the end the micro-batches
are shuffled. All keys come from a counter-based generator (Philox, its raw 64-bit output), so no order depends on a
global state, a platform, or a numpy version.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Cut", "Epoch"]


@dataclass(frozen=True)
class Epoch:
    """An epoch's batches: `rows[bounds[k]:bounds[k + 1]]` for k in `order`. rows [R'], bounds [n + 1], order [n]."""

    rows: np.ndarray
    bounds: np.ndarray
    order: np.ndarray

    def __len__(self) -> int:
        return len(self.order)

    def batch(self, number: int) -> np.ndarray:
        """Row numbers of a batch."""
        k = self.order[number]
        return self.rows[self.bounds[k] : self.bounds[k + 1]]


@dataclass(frozen=True)
class Cut:
    """The settings. max_tokens: rows times padded length of a batch at most; no row may be longer. max_rows: rows of a
    batch at most (None: any number). sort_pool: rows sorted by length together. multiple: lengths are padded to a
    multiple of it. buckets: increasing lengths that rows are padded to instead, the last as long as the longest row;
    (): none."""

    max_tokens: int
    max_rows: int | None = None
    sort_pool: int = 4096
    multiple: int = 1
    buckets: tuple[int, ...] = ()

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """The length that each row is padded to, were it the longest of its batch: [R'] -> [R']."""
        if self.buckets:
            return np.asarray(self.buckets)[np.searchsorted(self.buckets, lengths)]
        rounded: np.ndarray = -(-lengths // self.multiple) * self.multiple
        return rounded

    def rows(self, padded: int) -> int:
        """How many rows of a padded length make a full batch."""
        return min(self.max_tokens // padded, self.max_rows or self.max_tokens)

    def epoch(self, rows: np.ndarray, lengths: np.ndarray, key: tuple[int, int]) -> Epoch:
        """Cut `rows` [R'] (row numbers; `lengths` [R'] beside them). key: (seed, epoch)."""
        draws = np.random.Philox(key=np.array(key, dtype=np.uint64))
        order = np.argsort(draws.random_raw(len(rows)), kind="stable")
        bounds = [0]
        for pool in self._pools(order, lengths):
            first = bounds[-1]
            padded = self.padded(lengths[pool]).tolist()
            order[first : first + len(pool)] = pool
            at = 0
            while at < len(padded):
                at = min(at + self.rows(padded[at]), len(padded))
                bounds.append(first + at)
        batches = np.argsort(draws.random_raw(len(bounds) - 1), kind="stable")
        return Epoch(rows[order], np.array(bounds), batches)

    def _pools(self, order: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        """The parts of `order` out of which batches are cut: a bucket each, or a pool each, longest row first."""
        if self.buckets:
            bucket = self.padded(lengths[order])
            order, bucket = order[np.argsort(bucket, kind="stable")], np.sort(bucket)
            return np.split(order, np.flatnonzero(np.diff(bucket)) + 1)
        pools = np.split(order, range(self.sort_pool, len(order), self.sort_pool))
        return [pool[np.argsort(-lengths[pool], kind="stable")] for pool in pools]

    def shapes(self, epoch: Epoch, lengths: np.ndarray) -> list[tuple[int, int]]:
        """(rows, padded length) of the epoch's batches, each once, in order. lengths: of all rows, by row number."""
        longest = np.maximum.reduceat(lengths[epoch.rows], epoch.bounds[:-1])
        pairs = np.stack((np.diff(epoch.bounds), self.padded(longest)), axis=1)
        return [(int(rows), int(padded)) for rows, padded in np.unique(pairs, axis=0)]
