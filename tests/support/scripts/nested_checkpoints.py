"""Checkpoints around units, inside of them, and both."""

from __future__ import annotations

import functools

import models
import torch
from oracle import Run
from registry import script
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Parent(nn.Module):
    """Parameters of its own, of the root unit, around inner units."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((17,), 0.9))
        self.blocks = nn.ModuleList(models.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.gain * block(x)
        return x


class Nested(nn.Module):
    """A checkpoint around a parent of units."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embedding, self.parent = nn.Embedding(models.VOCABULARY, 17), Parent()
        self.head, self.reentrant = nn.Linear(17, models.VOCABULARY), reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(
            checkpoint(
                self.parent, self.embedding(tokens), use_reentrant=self.reentrant
            )
        )


def nested(reentrant: bool) -> nn.Module:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Nested(reentrant)


class Inside(models.Block):
    """A unit that checkpoints its own inside."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(checkpoint(self._body, x, use_reentrant=self.reentrant))

    def _body(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class InsideOut(nn.Module):
    """Units with a checkpoint inside, or outside, or both."""

    def __init__(self, reentrant: bool, outside: bool, inside: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 17)
        self.blocks = nn.ModuleList(
            Inside() if inside else models.Block() for _ in range(3)
        )
        for block in self.blocks:
            block.reentrant = reentrant
        self.head, self.reentrant, self.outside = (
            nn.Linear(17, models.VOCABULARY),
            reentrant,
            outside,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=self.reentrant)
                if self.outside
                else block(x)
            )
        return self.head(x)


def inside_out(reentrant: bool, outside: bool, inside: bool) -> nn.Module:
    """Return the same model each time."""
    torch.manual_seed(0)
    return InsideOut(reentrant, outside, inside)


def _squared(run: Run) -> None:
    def loss(of_rank: int, step: int) -> Tensor:
        tokens = models.share(models.batch(step)[0], of_rank, run.ranks)
        return (run.model(tokens) * run.model(tokens)).mean()

    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, functools.partial(loss, step=step))
        run.step()
        run.rest()


KINDS = {"reentrant": True, "not reentrant": False}
PLACES = {"outside": (True, False), "inside": (False, True), "both": (True, True)}
for kind, is_reentrant in KINDS.items():
    build = functools.partial(nested, is_reentrant)
    script(f"nested, {kind}", build=build)(Run.train)
    script(f"nested and squared, {kind}", build=build)(_squared)
    for place, flags in PLACES.items():
        build = functools.partial(inside_out, is_reentrant, *flags)
        script(f"checkpoint {place}, {kind}", build=build)(Run.train)


def _with_frozen(run: Run, reentrant: bool) -> None:
    run.model.checkpoint = reentrant
    frozen = [
        run.model.blocks[0].up.weight,
        run.model.blocks[0].up.bias,
        *run.model.blocks[1].parameters(),
    ]
    assert not any(p.requires_grad for p in frozen)
    run.train()


def _frozen_in_blocks() -> nn.Module:
    model = models.forked()
    model.blocks[0].up.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@script(build=_frozen_in_blocks, groups=_trainable)
def frozen_linear_in_a_checkpoint(run: Run) -> None:
    """Recomputed tensors have the shapes that were saved; one block is frozen
    wholly."""
    _with_frozen(run, reentrant=False)


@script(build=_frozen_in_blocks, groups=_trainable)
def frozen_linear_in_a_reentrant_checkpoint(run: Run) -> None:
    _with_frozen(run, reentrant=True)


def _two_losses(run: Run, together: bool) -> None:
    """Each loss goes through a reentrant checkpoint of the same block."""
    run.model.checkpoint = True
    for step in range(3):
        run.optimizer.zero_grad()
        for of_rank in run.each():
            losses = [
                run.loss(10 * step + i, of_rank, order=(0,))
                / (run.ranks if run.torch else 1)
                for i in range(2)
            ]
            if together:
                sum(losses).backward()  # type: ignore[union-attr]
            else:
                losses[1].backward()
                losses[0].backward()
        run.step()
        run.rest()


@script()
def reentrant_checkpoint_in_two_losses(run: Run) -> None:
    _two_losses(run, together=True)


@script()
def reentrant_checkpoint_in_two_losses_one_after_the_other(run: Run) -> None:
    _two_losses(run, together=False)
