"""FSDP2 and torch's AdamW behind the interface of `Run`, so that both sides train by
the same scripts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import models
import torch
import torch.distributed as dist
from oracle import Run, world
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

MODES = {3: True, 2: False}
"""Our stage, and the `reshard_after_forward` that keeps as much."""


def shard_units(model: nn.Module, units: Any, **options: Any) -> nn.Module:
    """Apply FSDP2 to the units that stage 3 has, and to the root."""
    mesh = dist.init_device_mesh("cpu", (world(),))
    for unit in units:
        fully_shard(unit, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def full(tensor: Tensor) -> Tensor:
    """Return a copy of all of a tensor."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


class Watched(Run):
    """A script on our optimizer; losses are noted."""

    def loss(self, step: int, of_rank: int, **forward: Any) -> Tensor:
        """Return the loss of one rank's share of a batch."""
        loss = super().loss(step, of_rank, **forward)
        self.losses = [*getattr(self, "losses", []), loss.detach()]
        return loss

    def found(self) -> dict[str, Any]:
        """Return what both optimizers have."""
        result = self.result()
        return {
            "params": result["params"],
            "seen": result["seen"],
            "losses": {"all": torch.stack(self.losses)},
        }


class Fsdp2(Watched):
    """The same script on FSDP2 and torch's AdamW."""

    def __init__(self, reshard: bool, **options: Any) -> None:
        """Build model and optimizer. Arguments as for `Run`."""
        self.stage, self.ranks = 3, world()
        self.model = models.forked()
        self.max_norm = options.pop("max_grad_norm", None)
        groups = options.pop("groups", lambda model: model.parameters())
        shard_units(self.model, self.model.blocks, reshard_after_forward=reshard)
        self.sharded = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            groups(self.model), lr=options.pop("lr", 1e-2), **options
        )
        self.seen: list[Tensor] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:  # type: ignore[override]
        """Accumulate without communication."""
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def step(self) -> None:
        """Update."""
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()

    def clip(self, max_norm: float) -> None:
        """Clip by a call, and note the norm."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.seen.append(full(norm))

    def note_buffers(self) -> None:
        """Do nothing: it has no ledger."""

    def result(self) -> dict[str, Any]:
        """Return all that can be compared."""
        return {
            "params": {name: full(param) for name, param in self.sharded.items()},
            "seen": {str(i): full(value).float() for i, value in enumerate(self.seen)},
        }
