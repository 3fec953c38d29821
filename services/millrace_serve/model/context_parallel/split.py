"""The division of a shared prompt chunk among the R replicas of a worker.

The chunk is cut into 2R blocks. The replica at place p, counted from the owner on, computes blocks p and 2R-1-p: a low
one that sees few keys and a high one that sees many, so causal attention costs all replicas the same. The owner has
the last block, whose last row samples.
"""

from dataclasses import dataclass

Span = tuple[int, int]  # tokens or rows [first, second)


@dataclass(frozen=True, slots=True)
class Split:
    """Prompt tokens [start, end) of a sequence that replica `owner` has; seen by replica `me`."""

    owner: int
    me: int
    replicas: int
    start: int
    end: int

    @property
    def mine(self) -> bool:
        return self.owner == self.me

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def blocks(self, replica: int) -> tuple[Span, Span]:
        """Both blocks of a replica, counted from `start` on."""
        low = (replica - self.owner) % self.replicas
        return self._block(low), self._block(2 * self.replicas - 1 - low)

    def num_rows(self, replica: int) -> int:
        return sum(end - first for first, end in self.blocks(replica))

    def order(self) -> list[tuple[int, Span]]:
        """For each block of the chunk, in order: the replica that has it, and where it lies among its rows."""
        low, high = [], []
        for place in range(self.replicas):
            replica = (self.owner + place) % self.replicas
            (first, end), _ = self.blocks(replica)
            low.append((replica, (0, end - first)))
            high.append((replica, (end - first, self.num_rows(replica))))
        return low + high[::-1]

    def _block(self, index: int) -> Span:
        count = 2 * self.replicas
        return self.num_tokens * index // count, self.num_tokens * (index + 1) // count
