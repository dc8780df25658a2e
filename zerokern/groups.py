"""Which ranks work together: who shards, over whom gradients are averaged, and who must
agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup


class Group:
    """A process group as this rank sees it, or one process alone."""

    def __init__(self, process_group: ProcessGroup | None) -> None:
        """Look at a group.

        Args:
            process_group: None for the default group, or a world of one if
                torch.distributed is not initialised.

        Raises:
            ValueError: this process is not a member.
        """
        if process_group is None and dist.is_available() and dist.is_initialized():
            process_group = dist.group.WORLD
        self.process_group = process_group
        self.rank = 0
        self.size = 1
        self.global_ranks: list[int] = [0]
        """The rank of each member in the default group."""
        self.others: list[int] = []
        """Every rank of the group but this one."""
        self.peers: list[int] = []
        """Those with whom transfers are formed. Where nothing is sent, one stands for
        all: forming thousands would take minutes."""
        self.is_nccl = False
        """Gathers are native, and nothing can be tagged."""
        self.is_fake = False
        """Nothing is sent, and nothing that ranks could differ in is compared."""
        if process_group is None:
            return
        self.rank = dist.get_rank(process_group)
        if self.rank < 0:
            raise ValueError(
                "this process is not a member of process_group; build the optimizer on"
                " its members only"
            )
        self.size = dist.get_world_size(process_group)
        self.global_ranks = dist.get_process_group_ranks(process_group)
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        backend = dist.get_backend(process_group)
        self.is_nccl = backend == "nccl"
        self.is_fake = backend == "fake"
        self.peers = self.others[:1] if self.is_fake else self.others

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks: for messages, not for training."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values


@dataclass(frozen=True)
class Groups:
    """The groups of one optimizer. Today all of them are one."""

    shards: Group
    """Each member holds one shard of every bucket."""
    averages: Group
    """Gradients are averaged over its members."""
    agrees: Group
    """Its members make the same collectives in the same order, and share norms."""

    @classmethod
    def over(cls, process_group: ProcessGroup | None) -> Groups:
        """Return the groups of an optimizer that shards over one group.

        Raises:
            ValueError: this process is not a member.
        """
        group = Group(process_group)
        return cls(group, group, group)

    def check_current(self) -> None:
        """Refuse a process that trains alone only because it did not know better.

        Raises:
            RuntimeError: torch.distributed was initialised after the optimizer was
                built.
        """
        if self.agrees.process_group is not None or not dist.is_initialized():
            return
        if dist.get_world_size() > 1:
            raise RuntimeError(
                "the optimizer was built before torch.distributed was initialised, so"
                f" each of the {dist.get_world_size()} ranks would train by itself;"
                " build it after init_process_group, or pass a group of one rank to"
                " train alone on purpose. Nothing was updated"
            )

    @property
    def alone(self) -> bool:
        """Whether there is one rank only, which sends nothing."""
        return self.agrees.size == 1
