"""A shard of each recipe, with everything that a step of it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zerokern import config, ops
from zerokern.kernels import codecs, storage

from .recipes import Recipe

LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1
COLUMNS = 32
"""Parameters of a timed shard."""

WINDOW = 2**18
"""Blocks that are filled at once: the codecs compute in int64, so a whole shard of 1 Gi
elements would need 100 GB."""


def random(
    device: str,
    numel: int,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """Return normal numbers, the same at every call on a device."""
    out = torch.empty(numel, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for piece in out.split(WINDOW * ops.BLOCK):
        piece.normal_(std=scale, generator=generator)
    return out


def column_map(numel: int, columns: int, device: str) -> ops.ColumnMap:
    """Return a shard of `columns` whole parameters of equal size."""
    blocks = numel // ops.BLOCK
    cuts = [blocks * column // columns for column in range(columns + 1)]
    runs = tuple(
        (cuts[column], cuts[column + 1], column, -cuts[column])
        for column in range(columns)
        if cuts[column] < cuts[column + 1]
    )
    block_column = torch.zeros(blocks, dtype=torch.int32)
    for first, end, column, _ in runs:
        block_column[first:end] = column
    origin = torch.tensor([-cut for cut in cuts[:-1]], dtype=torch.int64)
    return ops.ColumnMap(block_column.to(device), origin.to(device), runs)


def empty(recipe: Recipe, numel: int, device: str) -> ops.Shard:
    """Return a shard of zeros."""

    param = torch.zeros(numel, dtype=recipe.param, device=device)

    def moment(there: bool) -> ops.Moment | None:
        if recipe.moments is None or not there:
            return None
        return ops.empty_moment(param, recipe.moments)

    return ops.Shard(
        param,
        ops.empty_master(param, recipe.master or "none"),
        moment(True),
        moment(recipe.rule == "adam"),
        moment(recipe.amsgrad),
    )


def fill(
    shard: ops.Shard, weights: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
) -> None:
    """Write fp32 weights and moments to a shard in its formats, rounded to nearest; all
    on one device."""
    shard.param.copy_(weights)
    storage.store_master(shard, weights)
    storage.store_moment(shard.first, exp_avg, None, codecs.E3M4)
    storage.store_moment(shard.second, exp_avg_sq, None, codecs.UE3M5)
    storage.store_moment(shard.largest, exp_avg_sq, None, codecs.UE3M5)


def filled(recipe: Recipe, numel: int, device: str) -> ops.Shard:
    """Return a shard of numbers like those in training."""
    shard = empty(recipe, numel, device)
    for index, first in enumerate(range(0, numel // ops.BLOCK, WINDOW)):
        blocks = slice(first, min(first + WINDOW, numel // ops.BLOCK))
        size = (blocks.stop - blocks.start) * ops.BLOCK
        numbers = [
            random(device, size, scale=scale, seed=3 * index + i)
            for i, scale in enumerate((2e-2, 1e-3, 1e-3))
        ]
        fill(
            storage.part_of(shard, blocks), numbers[0], numbers[1], numbers[2].square_()
        )
    return shard


@dataclass
class Step:
    """A shard, its gradient, its scalars, and the calls that a step makes on them. One
    rank."""

    recipe: Recipe
    shard: ops.Shard
    grad: Tensor
    columns: ops.ColumnMap
    table: Tensor
    keys: Tensor
    steps: Tensor
    report: Tensor
    hyper: Tensor
    limits: Tensor
    gathered: Tensor
    group_of_column: Tensor
    seeds: Tensor
    partials: Tensor
    backend: config.Backend | None = None
    l2: bool = False

    @staticmethod
    def of(
        recipe: Recipe,
        numel: int,
        device: str,
        backend: config.Backend | None = None,
        columns: int = COLUMNS,
        shard: ops.Shard | None = None,
        grad: Tensor | None = None,
    ) -> Step:
        """Set up the eleventh step of a shard whose parameters all have gradients."""
        words = torch.zeros(1, 1 + -(-columns // 32), dtype=torch.int64)
        words[0, 0] = torch.tensor([1.0], dtype=torch.float64).view(torch.int64)[0]
        for column in range(columns):
            words[0, 1 + column // 32] |= 1 << column % 32
        step = Step(
            recipe=recipe,
            shard=filled(recipe, numel, device) if shard is None else shard,
            grad=(
                random(device, numel, recipe.grad, 1e-3, seed=4)
                if grad is None
                else grad
            ),
            columns=column_map(numel, columns, device),
            table=torch.zeros(len(ops.TABLE), columns, device=device),
            keys=torch.zeros(columns, dtype=torch.int64, device=device),
            steps=torch.full((columns,), 10, device=device),
            report=torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64, device=device),
            hyper=torch.zeros(1, len(ops.HYPER), dtype=torch.float64, device=device),
            limits=torch.zeros(2, dtype=torch.float64, device=device),
            gathered=words.to(device),
            group_of_column=torch.zeros(columns, dtype=torch.int64, device=device),
            seeds=(torch.arange(columns) * 12345).to(device),
            partials=torch.zeros(
                ops.partials_numel(numel), dtype=torch.float64, device=device
            ),
            backend=backend,
        )
        step.set()
        step.scalars()
        return step

    def set(
        self,
        lr: float = LR,
        weight_decay: float = DECAY,
        loss_scale: float = 1.0,
        max_norm: float = math.inf,
        decoupled: bool = True,
    ) -> None:
        """Write hyper-parameters and limits to their tensors, in place: a captured
        graph reads them from there."""
        numbers = {
            "lr": lr,
            "beta1": BETAS[0],
            "beta2": BETAS[1],
            "eps": EPS,
            "weight_decay": weight_decay,
        }
        numbers |= {
            "sign": 1.0,
            "decoupled": float(decoupled),
            "nesterov": float(self.recipe.nesterov),
        }
        self.l2 = not decoupled
        if self.recipe.rule == "sgd":
            numbers |= {"beta2": 0.0}  # dampening
        self.hyper.copy_(
            torch.tensor([[numbers[name] for name in ops.HYPER]], dtype=torch.float64)
        )
        self.limits.copy_(torch.tensor([max_norm, loss_scale], dtype=torch.float64))

    def scalars(self) -> None:
        """Form the scalar table, and count."""
        ops.scalars_(
            self.table,
            self.keys,
            self.steps,
            self.report,
            rule=self.recipe.rule,
            hyper=self.hyper,
            group_of_column=self.group_of_column,
            seeds=self.seeds,
            gathered=self.gathered,
            limits=self.limits,
            backend=self.backend,
        )

    def update(self) -> None:
        """Run the update alone."""
        ops.update_(
            self.shard,
            self.grad,
            rule=self.recipe.rule,
            table=self.table,
            keys=self.keys,
            columns=self.columns,
            l2=self.l2,
            backend=self.backend,
        )

    def step(self) -> None:
        """Do what `optimizer.step()` does without clipping."""
        self.scalars()
        self.update()

    def clipped_step(self) -> None:
        """Reduce, take the norm, and do a step: all that follows the collective."""
        none = self.grad.new_empty(0, self.grad.numel())
        ops.reduce_(
            self.grad,
            self.grad,
            none,
            self.partials,
            rank=0,
            scale=1.0,
            backend=self.backend,
        )
        self.gathered[0, :1].view(torch.float64).copy_(self.partials.sum())
        self.step()

    def tensors(self) -> list[Tensor]:
        """Return everything that a step writes."""
        return [*self.shard.tensors(), self.table, self.keys, self.steps, self.report]

    def copy(self) -> Step:
        """Return a step on copies of all that this one reads or writes."""
        shard = ops.Shard(
            self.shard.param.clone(),
            None if self.shard.master is None else self.shard.master.clone(),
            *(
                (
                    None
                    if m is None
                    else ops.Moment(
                        m.values.clone(), None if m.scale is None else m.scale.clone()
                    )
                )
                for m in self.shard.moments
            ),
        )
        names = (
            "table",
            "keys",
            "steps",
            "report",
            "hyper",
            "limits",
            "gathered",
            "partials",
            "grad",
        )
        return replace(
            self, shard=shard, **{name: getattr(self, name).clone() for name in names}
        )
