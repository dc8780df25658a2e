"""How fast a cluster is: rates of one rank, links, and what a collective takes on
them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from .rehearsal import Launch, Work


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates in SI units; bandwidths of one rank, in one direction.

    The defaults are assumptions about nodes of H100 GPUs, not measurements. `calibrate`
    measures them where it runs.
    """

    compute: float = 400e12
    """Floating-point operations per second that matrix products reach."""
    peak: float = 989e12
    """Floating-point operations per second that the maker promises: what utilisation is
    measured against."""
    memory: float = 2.5e12
    """Bytes per second that element-wise operations and kernels reach."""
    per_operation: float = 5e-6
    """Seconds that an operation takes, however small."""
    intra: float = 300e9
    """Bytes per second to ranks of the same node."""
    inter: float = 40e9
    """Bytes per second to ranks of other nodes."""
    latency: float = 20e-6
    """Seconds that a collective takes, however small: per doubling of the ranks, or
    with gloo per other rank."""
    per_node: int = 8
    """Ranks of a node."""
    native_gather: bool = True
    """All-gathers are a ring (NCCL); else every rank sends to every other one
    (gloo)."""
    cores: float | None = None
    """CPU cores that the ranks of a node share, if they compute on a CPU. Transfers
    take cores, too."""
    name: str = "assumed: H100 nodes"

    def seconds(self, work: Work, world: int) -> float:
        """Return how long a rank computes."""
        alone = (
            work.flops / self.compute
            + work.bytes / self.memory
            + work.operations * self.per_operation
        )
        return alone * self.crowding(world)

    def crowding(self, world: int) -> float:
        """Return by how much ranks slow each other down when they are more than
        cores."""
        return (
            1.0
            if self.cores is None
            else max(1.0, min(world, self.per_node) / self.cores)
        )

    def split(self, launch: Launch, world: int) -> tuple[float, float]:
        """Return the bytes that a rank sends inside of its node and to others, for a
        collective over `world` ranks.

        Every rank sends to every other one: shares are as the numbers of ranks. A ring
        of n ranks a node crosses between nodes once for n ranks, whose links share it.
        """
        if launch.group == 1 or world == 1:
            return 0.0, 0.0
        here = min(self.per_node, world)
        sent = launch.sent / (launch.group - 1) * launch.group * (world - 1) / world
        if world <= here:
            return float(sent), 0.0
        if launch.op == "all_gather" and self.native_gather:
            return sent * (here - 1) / here, sent / here
        return sent * (here - 1) / (world - 1), sent * (world - here) / (world - 1)

    def transfer(self, launch: Launch, world: int) -> float:
        """Return how long a collective takes on the wire."""
        inside, across = self.split(launch, world)
        if not inside and not across:
            return 0.0
        return max(inside / self.intra, across / self.inter) + self.latency * self.hops(
            world
        )

    def copying(self, launch: Launch, world: int) -> tuple[float, float]:
        """Return, where ranks share cores, how long a rank copies, and how long the
        link to other nodes takes."""
        inside, across = self.split(launch, world)
        if not inside and not across:
            return 0.0, 0.0
        copying = (inside + across) / self.intra * self.crowding(
            world
        ) + self.latency * self.hops(world)
        return copying, across / self.inter

    def hops(self, world: int) -> int:
        """Return how many latencies a collective takes."""
        return (world - 1).bit_length() if self.native_gather else world - 1

    def save(self, path: Path) -> None:
        """Write to a JSON file."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Machine:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is not there or holds something else.
        """
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} is no machine file ({error}); write one with `zerokern plan"
                f" --calibrate --machine {path}`"
            ) from error
