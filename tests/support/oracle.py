"""What a sharded run is compared with, and how: torch's AdamW on one process, which
plays every rank in turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import models
import torch
import torch.distributed as dist
from at_rest import assert_at_rest
from torch import Tensor, nn

import zerokern

STAGES = (1, 2, 3)

REDUCED_SUMS = 2e-5
"""Largest difference, relative to the largest element of a tensor, that another order
of fp32 sums may make in a few steps: Adam divides by the root of the second moment, so
the last bits of a gradient near zero move a parameter."""


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """Return the world size; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sharded(
    model: nn.Module,
    stage: int,
    params: Any = None,
    *,
    adam: Any = zerokern.AdamW,
    **options: Any,
) -> Any:
    """Return our optimizer over `params`, by default all of the model's."""
    if stage == 3:
        options["model"] = model
    return adam(
        model.parameters() if params is None else params, stage=stage, **options
    )


def whole(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return copies of all parameters, gathered."""
    with (
        optimizer.full_params() if hasattr(optimizer, "full_params") else nullcontext()
    ):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return copies of the whole state, as "parameter/name"."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if hasattr(optimizer, "full_state_dict"):
        state = optimizer.full_state_dict()["state"]
    else:
        # Torch's state_dict() fails over parameters that were taken out of a group.
        state = {i: optimizer.state.get(p, {}) for i, p in enumerate(params)}
    return {
        f"{name_of[id(params[index])]}/{key}": value.clone()
        for index, entry in state.items()
        for key, value in entry.items()
        if isinstance(value, Tensor)
    }


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors whose values are not the same bit for bit, or that
    only one side has."""
    return [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours
        or name not in theirs
        or ours[name].dtype != theirs[name].dtype
        or not torch.equal(ours[name], theirs[name])
    ]


def distances(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Return each tensor's largest difference, relative to its largest element."""
    assert ours.keys() == theirs.keys()
    return {name: distance(ours[name], theirs[name]) for name in ours}


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference relative to the largest element; infinite if it is
    not a number."""
    assert ours.shape == theirs.shape
    if not ours.numel():
        return 0.0
    ours, theirs = ours.double(), theirs.double()
    value = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item()
    return value if value == value else float("inf")


def apart(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], limit: float = REDUCED_SUMS
) -> dict[str, float]:
    """Return the tensors that are further apart than the limit: {} is agreement."""
    return {
        name: value
        for name, value in distances(ours, theirs).items()
        if not value <= limit
    }


def integer_gradient(
    shape: Any, step: int, index: int, of_rank: int, ranks: int
) -> Tensor:
    """Return small integers whose mean over the ranks is the same for every world, so
    that every sum is exact."""
    generator = torch.Generator().manual_seed(7919 * step + index)
    mean = torch.randint(-8, 9, tuple(shape), generator=generator)
    spread = torch.randint(-4, 5, tuple(shape), generator=generator)
    return (mean + (2 * of_rank - (ranks - 1)) * spread).float()


def set_integer_gradients(model: nn.Module, step: int) -> None:
    """Assign this rank's integer gradients to p.grad."""
    for index, param in enumerate(model.parameters()):
        if param.requires_grad:
            param.grad = integer_gradient(param.shape, step, index, rank(), world()).to(
                param.dtype
            )


class Run:
    """One training script, the same for our optimizer (on each rank) and for torch's
    (which plays `ranks` ranks)."""

    def __init__(
        self,
        stage: int | None,
        ranks: int,
        *,
        build: Callable[[], nn.Module] = models.forked,
        **options: Any,
    ) -> None:
        """Build model and optimizer.

        Args:
            stage: of ours; None for torch's.
            ranks: that torch's plays; of ours, the world size.
            build: makes the model.
            options: of the optimizer. `groups` is a function from the model to param
                groups.
        """
        self.stage, self.ranks = stage, ranks
        self.model = build()
        self.lr = options.pop("lr", 1e-2)
        groups = options.pop("groups", lambda model: model.parameters())
        self.max_norm = options.pop("max_grad_norm", None)
        if stage is None:
            options.pop("buckets", None)
            self.optimizer: Any = torch.optim.AdamW(
                groups(self.model), lr=self.lr, **options
            )
        else:
            self.optimizer = sharded(
                self.model,
                stage,
                groups(self.model),
                lr=self.lr,
                max_grad_norm=self.max_norm,
                **options,
            )
        self.buffers: list[int] = []
        """Bytes of scratch memory, each time the script asked."""
        self.seen: list[Tensor] = []
        """What the script observed: losses, norms."""

    @property
    def torch(self) -> bool:
        """Whether this is the reference."""
        return self.stage is None

    def each(self) -> list[int]:
        """Return the ranks that this process plays."""
        return list(range(self.ranks)) if self.torch else [rank()]

    def loss(self, step: int, of_rank: int, **forward: Any) -> Tensor:
        """Return the loss of one rank's share of a batch."""
        tokens, targets = (
            models.share(t, of_rank, self.ranks) for t in models.batch(step)
        )
        logits = self.model(tokens, **forward) if forward else self.model(tokens)
        return nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten()
        )

    def backward(
        self, step: int, loss: Callable[[int], Tensor] | None = None, **forward: Any
    ) -> None:
        """Form the gradients of the mean loss over the ranks."""
        for r in self.each():
            value = self.loss(step, r, **forward) if loss is None else loss(r)
            self.part(value).backward()

    def part(self, loss: Tensor) -> Tensor:
        """Return what the loss of one rank adds to the mean, for a loop that calls
        backward itself."""
        return loss / self.ranks if self.torch else loss

    def set_gradient(self, name: str, of_rank: Callable[[int], Tensor]) -> None:
        """Assign p.grad by hand, each rank its own."""
        values = [of_rank(r) for r in self.each()]
        dict(self.model.named_parameters())[name].grad = sum(values) / len(values)  # type: ignore[assignment]

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate without communication."""
        return nullcontext() if self.torch else self.optimizer.no_sync()

    def step(self) -> None:
        """Update."""
        if self.torch and self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.note_buffers()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> None:
        """Clip by a call, and note the norm."""
        if self.torch:
            params = self.model.parameters()
            norm = nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        else:
            norm = self.optimizer.clip_grad_norm_(max_norm, norm_type)
        self.seen.append(norm.detach().clone())

    def clip_value(self, limit: float) -> None:
        """Clamp every element by a call."""
        if self.torch:
            nn.utils.clip_grad_value_(self.model.parameters(), limit)
        else:
            self.optimizer.clip_grad_value_(limit)

    def note_norm(self, norm_type: float = 2.0) -> None:
        """Note the total norm of the gradients, and clip nothing."""
        if self.torch:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(grads, norm_type)
        else:
            norm = self.optimizer.get_total_norm(norm_type)
        self.seen.append(norm.detach().clone())

    def evaluate(self, step: int) -> None:
        """Note a loss under no_grad, of the whole batch on every rank."""
        self.model.eval()
        with torch.no_grad():
            tokens, targets = models.batch(step)
            self.seen.append(
                nn.functional.cross_entropy(
                    self.model(tokens).flatten(0, 1), targets.flatten()
                )
            )
        self.model.train()
        self.note_buffers()

    def iterate(self, step: int, **forward: Any) -> None:
        """Do what most loops do, once."""
        self.optimizer.zero_grad()
        self.backward(step, **forward)
        self.step()

    def train(self, steps: int = 3) -> None:
        """Do what most loops do."""
        for step in range(steps):
            self.iterate(step)
            self.rest()

    def rest(self) -> None:
        """Note that nothing is under way, gathered or half done."""
        self.note_buffers()
        if not self.torch:
            assert_at_rest(self.optimizer)

    def note_buffers(self) -> None:
        """Note the scratch memory in use."""
        if not self.torch:
            self.buffers.append(self.optimizer.memory().buffers)

    def result(self) -> dict[str, Any]:
        """Return all that can be compared."""
        found = {
            "params": whole(self.model, self.optimizer),
            "state": state_of(self.model, self.optimizer),
            "seen": {str(i): value.float() for i, value in enumerate(self.seen)},
            "buffers": self.buffers,
        }
        if not self.torch:
            found["log"] = self.optimizer.comm_log()
            found["skipped"] = int(self.optimizer.skipped_steps)
        return found


def quiet_state_dict(optimizer: Any) -> dict[str, Any]:
    """Return `state_dict()` without the warning that it is a shard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optimizer.state_dict()
