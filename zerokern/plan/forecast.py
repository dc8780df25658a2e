"""A forecast of a strategy: bytes, collectives, seconds. A rehearsal of two
steps of the real code."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..comm_log import Call
from ..config import Buckets, Precision
from ..layout import BLOCK
from ..memory import Memory
from ..optimizer import AdamW
from ..sharding.units import ROOT, unit_modules
from .ledger import Peak
from .machine import Machine
from .rehearsal import Rehearsal, Trace, Work
from .replay import Timing, replay
from .workload import Loss, Workload

MANY = 2**15
"""Ranks whose list alone takes a while: whether the model is large enough for them is
asked first."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The cluster, and what all strategies on it have in common."""

    world: int
    """Ranks."""
    machine: Machine = field(default_factory=Machine)
    accumulate: int = 1
    """Micro-batches of a step."""
    no_sync: bool = True
    """All but the last of them under `no_sync`."""
    buckets: Buckets = field(default_factory=Buckets)
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A stage, a recipe of precisions, with or without checkpointing."""

    stage: int
    recipe: str = ""
    """The name of `precision`."""
    precision: Precision = field(default_factory=Precision)
    checkpointing: bool = False
    """Recompute the activations of every unit in backward."""

    @property
    def title(self) -> str:
        """A few words."""
        checkpointing = ", checkpointing" if self.checkpointing else ""
        return f"stage {self.stage}, {self.recipe or 'default'}{checkpointing}"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Figures per rank. All ranks hold and send the same: shards are equal."""

    strategy: Strategy
    setting: Setting
    params: int
    memory: Memory
    """Between steps, as `optimizer.memory()` will say."""
    padding: int
    """Of these, what fills shards and blocks up; of all ranks, the mean."""
    others: int
    """Bytes beside that between steps: frozen parameters of stages 1 and 2, the model's
    own buffers, the batch."""
    peak: Peak | None
    """Live bytes of a step; None if no batch is known."""
    largest_unit: int
    """Bytes of the largest gathered unit and its gradients."""
    calls: Sequence[Call]
    """Collectives of construction and of two steps."""
    trace: Trace
    """Of the second step."""
    samples: int
    """Tokens or samples of a rank's micro-batch."""

    @property
    def needs(self) -> int:
        """Bytes that the GPU must have."""
        return self.peak.bytes if self.peak else self.memory.total + self.others

    def sent(self) -> dict[str, int]:
        """Return the bytes that a rank sends in a step, by collective."""
        found: Counter[str] = Counter()
        for call in self.calls:
            if call.step == 1 and call.phase != "init":
                found[call.op] += call.bytes
        return dict(found)

    def timing(self, world: int | None = None) -> Timing:
        """Return the seconds of a step, in another world if one is given."""
        return replay(self.trace, self.setting.machine, world or self.setting.world)

    def throughput(self, world: int | None = None) -> float:
        """Return tokens, or samples, per second of all ranks."""
        world = world or self.setting.world
        return self.samples * self.setting.accumulate * world / self.timing(world).step

    def model_flops(self) -> int:
        """Return what a step must compute: three times the forward pass. Recomputation
        is not counted."""
        return 3 * sum(
            e.flops
            for e in self.trace.events
            if isinstance(e, Work) and e.phase == "forward"
        )

    def utilisation(self) -> float:
        """Return the model FLOPs utilisation: of the hardware's peak, what the model
        itself uses."""
        return self.model_flops() / self.timing().step / self.setting.machine.peak


def forecast(workload: Workload, strategy: Strategy, setting: Setting) -> Forecast:
    """Rehearse two steps and return what they take.

    Raises:
        ValueError: the model cannot be built or trained without data; says why.
    """
    if setting.world > MANY:
        with Rehearsal(1):
            check_size(workload.build()[0], setting.world)
    with Rehearsal(setting.world, setting.rank) as rehearsal:
        model, loss = workload.build()
        model.train()
        params = check_size(model, setting.world)
        if strategy.checkpointing:
            checkpoint_units(model, setting.buckets)
        optimizer = AdamW(
            model.parameters(),
            lr=1e-3,
            stage=strategy.stage,
            model=model,
            precision=strategy.precision,
            buckets=setting.buckets,
        )
        gc.collect()
        rehearsal.ledger.reset_peak()
        if loss is not None:
            for _ in range(2):
                rehearsal.record()
                _step(model, loss, optimizer, setting)
        gc.collect()
        return Forecast(
            strategy=strategy,
            setting=setting,
            params=params,
            memory=optimizer.memory(),
            padding=_padding(optimizer),
            others=rehearsal.ledger.live - optimizer.memory().total,
            peak=rehearsal.ledger.peak if loss is not None else None,
            largest_unit=_largest_unit(optimizer),
            calls=optimizer.comm_log(),
            trace=rehearsal.record(),
            samples=workload.tokens,
        )


def check_size(model: nn.Module, world: int) -> int:
    """Return the number of parameters.

    Raises:
        ValueError: they are fewer than the ranks.
    """
    params = sum(p.numel() for p in model.parameters())
    if params < world:
        raise ValueError(
            f"{world:,} ranks for {params:,} parameters: there are more ranks than"
            f" elements to shard; use {max(1, params // BLOCK):,} ranks at most, or"
            " plain data parallelism"
        )
    return params


def _step(
    model: nn.Module,
    loss: Loss,
    optimizer: AdamW,
    setting: Setting,
) -> None:
    optimizer.zero_grad()
    for micro_batch in range(setting.accumulate):
        last = micro_batch == setting.accumulate - 1
        with nullcontext() if last or not setting.no_sync else optimizer.no_sync():
            _forward(model, loss).backward()
    optimizer.step()
    optimizer.zero_grad()


def _forward(model: nn.Module, loss: Loss) -> Tensor:
    try:
        return loss(model)
    except ValueError:
        raise
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise ValueError(
            f"the forward pass fails on tensors without values ({type(error).__name__}:"
            f" {said}); another --dtype may help, or a function that returns the model"
            " and a loss that does without"
        ) from error


def _padding(optimizer: AdamW) -> int:
    layout = optimizer.coordinator.layout
    memory = optimizer.memory()
    return round(
        (memory.total - memory.tables) * (1 - layout.numel / layout.padded_numel)
    )


def _largest_unit(optimizer: AdamW) -> int:
    buckets = optimizer.coordinator.layout.buckets
    by_unit: Counter[str] = Counter()
    for bucket in buckets:
        by_unit[bucket.unit or str(bucket.index)] += (
            bucket.numel * bucket.itemsize * (2 if bucket.trainable else 1)
        )
    return max(by_unit.values())


def checkpoint_units(model: nn.Module, buckets: Buckets) -> None:
    """Keep only the inputs of every unit's forward, and compute the rest again in
    backward."""
    for name, module in unit_modules(model, buckets.units).items():
        if name != ROOT:
            original = module.forward

            def forward(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                return checkpoint(_original, *args, use_reentrant=False, **kwargs)

            module.forward = forward
