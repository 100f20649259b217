"""How long messages take, among ranks of a node or over several.

Collectives are rings, as NCCL has them for large messages: of n ranks each sends (n-1)/n of the data. Over nodes, a ring
passes each node once, and leaves it by the adapters of all its members there, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from mega_trainer.plan.machine import Efficiency, Machine


@dataclass(frozen=True)
class Ranks:
    """A group of ranks: how many, and how many of them lie on one node."""

    size: int
    local: int

    @property
    def nodes(self) -> int:
        """Over which they lie."""
        return -(-self.size // self.local)


@dataclass(frozen=True)
class Wires:
    """What joins GPUs.

    Attributes:
        link: bytes a second from a GPU to those of its node, one way, as large messages get them.
        network: the same to other nodes.
        exchange: the same, when every rank sends to every other.
        hop: seconds from one rank of a ring to the next.
        node: ranks of a node.
        host: bytes a second between a GPU and host memory, one way.
    """

    link: float
    network: float
    exchange: float
    hop: float
    node: int
    host: float

    @classmethod
    def of(cls, machine: Machine, efficiency: Efficiency) -> Wires:
        """Those of a machine."""
        link, network = machine.link_gb_s * efficiency.link, machine.network_gb_s * efficiency.network
        exchange = machine.network_gb_s * efficiency.exchange
        host = machine.host_gb_s * efficiency.link
        return cls(link * 1e9, network * 1e9, exchange * 1e9, efficiency.hop, machine.ranks_per_node, host * 1e9)

    def ranks(self, size: int, stride: int) -> Ranks:
        """Of a job whose ranks fill node by node, a group of `size` of which each is `stride` ranks from the next."""
        return Ranks(size, min(size, max(1, self.node // stride)))

    def gather(self, total: float, ranks: Ranks) -> float:
        """Seconds until each has all of `total` bytes, of which each brought a part; or has its part of their sum."""
        if ranks.size == 1:
            return 0.0
        rate = self.link if ranks.local == ranks.size else min(self.link, ranks.local * self.network)
        return total * (ranks.size - 1) / ranks.size / rate + self.hop * ranks.size

    def all_reduce(self, total: float, ranks: Ranks) -> float:
        """Seconds until each has the sum of `total` bytes: a reduce-scatter and an all-gather."""
        return 2 * self.gather(total, ranks)

    def all_to_all(self, sent: float, ranks: Ranks) -> float:
        """Seconds until each has sent `sent` bytes, as many to each, itself included."""
        if ranks.size == 1:
            return 0.0
        near, far = (ranks.local - 1) / ranks.size, (ranks.size - ranks.local) / ranks.size
        return sent * max(near / self.link, far / self.exchange) + self.hop

    def send(self, size: float, stride: int) -> float:
        """Seconds of a message of `size` bytes to the rank that is `stride` ranks away."""
        return size / (self.link if stride < self.node else self.network) + self.hop
