"""A long and eventful life of an optimizer: a random script, the same on all ranks, and
an oracle that lives it alone.

The oracle has no process group and plays every rank in turn: gradients by autograd on a
plain model, summed in rank order in fp32, times fp32(1 / W), added up as each stage's
rules say, and given to AdamW in a world of one. So both sides do the same operations in
the same order, and every weight must have the same bits.
"""

from __future__ import annotations

import gc
import itertools
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
import torch
from oracle import quiet_state_dict, rank, sharded, state_of, whole, world
from torch import Tensor, nn
from torch.nn import functional as F

import zerokern

FAULTS = ("forward", "loss", "backward", "recompute")
PLACES = ("0", "0.up", "0.norm", "1", "1.down", "2")
"""Modules in which users' code fails. Every rank runs all of these."""
ORDERS = ((0, 1), (0, 1), (1, 0), (0, 1, 0))
USES = ("both", "both", "left", "right")
PAGE = 4096


class Fault(Exception):
    """The user's code failed."""


@dataclass(frozen=True)
class Micro:
    """One forward and backward."""

    batch: int
    no_sync: bool
    uses: tuple[str, ...]
    """Branches of the fork, by rank."""
    order: tuple[int, ...]
    checkpoint: bool | None
    infinite_on: int | None
    """The rank whose gradients are not finite."""
    evaluate: bool
    """Evaluate afterwards."""
    read: bool
    """Read all parameters afterwards."""


@dataclass(frozen=True)
class Step:
    """What happens between two calls of zero_grad."""

    micros: tuple[Micro, ...]
    fault: tuple[str, str] | None
    """What fails in the last micro-batch, and where. Then there is no update."""
    lr: float
    clip: float | None
    set_to_none: bool
    zeroed_by_model: bool
    reload: bool
    """Load the optimizer's own state afterwards."""


def script(seed: int, steps: int, ranks: int) -> list[Step]:
    """Return random steps, the same for the same arguments."""
    chance = random.Random(seed)
    return [_step(chance, number, ranks) for number in range(steps)]


def _step(chance: random.Random, number: int, ranks: int) -> Step:
    fault = (
        (chance.choice(FAULTS), chance.choice(PLACES))
        if chance.random() < 0.15
        else None
    )
    count = chance.choice((1, 1, 2, 3))
    infinite = chance.randrange(count) if chance.random() < 0.06 else None
    micros = [
        _micro(chance, 10 * number + i, ranks, infinite=i == infinite)
        for i in range(count)
    ]
    if fault is not None and fault[0] == "recompute" and micros[-1].checkpoint is None:
        fault = ("backward", fault[1])
    return Step(
        micros=tuple(micros),
        fault=fault,
        lr=chance.choice((1e-3, 3e-3, 1e-2)),
        clip=chance.choice((None, None, 0.3, 100.0)),
        set_to_none=chance.random() < 0.7,
        zeroed_by_model=chance.random() < 0.2,
        reload=chance.random() < 0.05,
    )


def _micro(chance: random.Random, batch: int, ranks: int, *, infinite: bool) -> Micro:
    checkpoint = chance.choice((None, None, False, True))
    # A reentrant checkpoint brings the gradients of two calls apart, and the first time
    # the engine cannot know that.
    order = chance.choice(ORDERS[:3] if checkpoint else ORDERS)
    return Micro(
        batch=batch,
        no_sync=chance.random() < 0.3,
        uses=tuple(chance.choice(USES) for _ in range(ranks)),
        order=order,
        checkpoint=checkpoint,
        infinite_on=chance.randrange(ranks) if infinite else None,
        evaluate=chance.random() < 0.15,
        read=chance.random() < 0.1,
    )


# ------------------------------------------------------------------- what both sides do


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return matrices, which decay, and the rest, which does not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


def run_micro(
    model: Any, micro: Micro, of_rank: int, fault: tuple[str, str] | None
) -> float:
    """Run forward and backward of one rank's rows. Return the loss."""
    model.checkpoint = micro.checkpoint
    tokens, targets = (
        models.share(t, of_rank, len(micro.uses)) for t in models.batch(micro.batch)
    )
    with broken(model, fault):
        logits = model(tokens, micro.order, micro.uses[of_rank])
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if fault is not None and fault[0] == "loss":
            raise Fault
        (loss * float("inf") if micro.infinite_on == of_rank else loss).backward()
    return loss.item()


def evaluate(model: Any, micro: Micro, of_rank: int) -> float:
    """Return the loss of other rows, without a graph."""
    model.checkpoint = None
    tokens, targets = (
        models.share(t, of_rank, len(micro.uses)) for t in models.batch(micro.batch + 7)
    )
    with torch.no_grad():
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()


@contextmanager
def broken(model: Any, fault: tuple[str, str] | None) -> Iterator[None]:
    """Let a module raise in its forward, in backward, or in its recomputation."""
    kind, place = fault if fault is not None else ("", "")
    if kind in ("", "loss"):
        yield
        return
    module = model.blocks.get_submodule(place)

    def fail(*_: Any) -> None:
        if kind != "recompute" or torch._C._current_graph_task_id() != -1:
            raise Fault

    def fail_later(_: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    later = kind == "backward"
    handle = (
        module.register_forward_hook(fail_later)
        if later
        else module.register_forward_pre_hook(fail)
    )
    try:
        yield
    finally:
        handle.remove()


def digest(tensors: Iterable[Tensor]) -> int:
    """Return a checksum of the bits."""
    value = 0
    for tensor in tensors:
        # An array of the memory itself would pin it.
        value = zlib.crc32(tensor.detach().clone().numpy(), value)
    return value


@contextmanager
def deterministic() -> Iterator[None]:
    """Run in torch's deterministic mode."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass
class Life:
    """What was seen of a run, on one rank."""

    seen: list[tuple[int, str, float]] = field(default_factory=list)
    """(step, what, value): losses, checksums of parameters. The same bits on both
    sides."""
    norms: list[float] = field(default_factory=list)
    whole: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Parameters and state after some steps."""
    skipped: int = 0
    faults: int = 0


def losses_differ(ours: Life, theirs: Life) -> tuple[Any, ...]:
    """Return the first observations that differ; () if none do."""
    pairs = itertools.zip_longest(ours.seen, theirs.seen)
    return next((pair for pair in pairs if pair[0] != pair[1]), ())


# ---------------------------------------------------------------------- on the ranks


@dataclass
class Memory:
    """What a rank holds after each step."""

    roles: list[dict[str, int]] = field(default_factory=list)
    """`optimizer.memory()` after an update and zero_grad."""
    after_faults: list[int] = field(default_factory=list)
    """Scratch memory in use where the user's exception is caught."""
    abandoned: list[dict[str, int]] = field(default_factory=list)
    """`optimizer.memory()` after zero_grad, without an update."""
    peak: list[int] = field(default_factory=list)
    """Largest scratch memory so far."""
    tensors: list[int] = field(default_factory=list)
    """Tensors that Python knows of after an update and zero_grad. An abandoned step may
    leave local gradients."""
    resident: list[int] = field(default_factory=list)
    """Bytes of the process."""


def live(
    stage: int, steps: Sequence[Step], checkpoints: Sequence[int], probe_every: int = 10
) -> tuple[Life, Memory]:
    """Run a script on this rank."""
    life, memory = Life(), Memory()
    gc.collect()
    gc.freeze()  # what was there before is not counted
    with deterministic():
        model = models.forked()
        optimizer = sharded(model, stage, groups_of(model))
        optimizer.coordinator.transport.poison = True
        for number, step in enumerate(steps):
            updates = len(memory.roles)
            _live_step(model, optimizer, step, number, life, memory)
            memory.peak.append(optimizer.coordinator.transport.peak_bytes)
            optimizer.comm_log(clear=True)  # the log itself grows up to 65,536 entries
            if number % probe_every == 0:
                if len(memory.roles) > updates:
                    memory.tensors.append(
                        _tensors() - sum(map(len, life.whole.values()))
                    )
                memory.resident.append(_resident_bytes())
            if number + 1 in checkpoints:
                life.whole[number + 1] = {
                    **whole(model, optimizer),
                    **state_of(model, optimizer),
                }
    life.skipped = int(optimizer.skipped_steps)
    gc.unfreeze()
    return life, memory


def _live_step(
    model: Any, optimizer: Any, step: Step, number: int, life: Life, memory: Memory
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = step.lr
    held = memory.roles
    try:
        for index, micro in enumerate(step.micros):
            fault = step.fault if index == len(step.micros) - 1 else None
            with optimizer.no_sync() if micro.no_sync else nullcontext():
                life.seen.append(
                    (number, "loss", run_micro(model, micro, rank(), fault))
                )
            if micro.evaluate:
                life.seen.append((number, "evaluation", evaluate(model, micro, rank())))
            if micro.read:
                with optimizer.full_params():
                    life.seen.append((number, "parameters", digest(model.parameters())))
    except Fault:
        life.faults += 1
        memory.after_faults.append(optimizer.memory().buffers)
        held = memory.abandoned
    else:
        if step.clip is not None:
            life.norms.append(optimizer.clip_grad_norm_(step.clip).item())
        optimizer.step()
    (model if step.zeroed_by_model else optimizer).zero_grad(
        set_to_none=step.set_to_none
    )
    held.append(vars(optimizer.memory()))
    if step.reload:
        optimizer.load_state_dict(quiet_state_dict(optimizer))


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


# ---------------------------------------------------------------------- alone


class Oracle:
    """Plays all ranks in one process."""

    def __init__(self, stage: int, ranks: int) -> None:
        """Build.

        Args:
            stage: whose order of sums to follow. 2 and 3 are the same.
            ranks: to play.
        """
        assert world() == 1
        self.once_per_step, self.ranks = stage == 1, ranks
        self.model, self.held = models.forked(), models.forked()
        """Where gradients are formed, and where the optimizer updates."""
        self.optimizer = zerokern.AdamW(groups_of(self.held))
        self.params = list(self.model.parameters())
        self.local: list[list[Tensor | None]] = [
            [None] * len(self.params) for _ in range(ranks)
        ]
        """p.grad of each rank: what was not reduced yet."""
        self.reduced: list[Tensor | None] = [None] * len(self.params)
        self.backwards = 0
        self.foreseen: int | None = 1
        self.lives = [Life() for _ in range(ranks)]

    def run(self, steps: Sequence[Step], checkpoints: Sequence[int]) -> list[Life]:
        """Run a script; return what each rank must have seen."""
        with deterministic():
            for number, step in enumerate(steps):
                self._run_step(step, number)
                if number + 1 in checkpoints:
                    found = {
                        **whole(self.held, self.optimizer),
                        **state_of(self.held, self.optimizer),
                    }
                    for life in self.lives:
                        life.whole[number + 1] = found
        for life in self.lives:
            life.skipped = int(self.optimizer.skipped_steps)
        return self.lives

    def _run_step(self, step: Step, number: int) -> None:
        failed = False
        for index, micro in enumerate(step.micros):
            fault = step.fault if index == len(step.micros) - 1 else None
            failed = self._backward(micro, number, fault)
            if failed:
                break
            if not micro.no_sync:
                self.backwards += 1
                if not self.once_per_step or self.backwards == self.foreseen:
                    self._reduce()
            for r, life in enumerate(self.lives):
                if micro.evaluate:
                    life.seen.append(
                        (number, "evaluation", evaluate(self.model, micro, r))
                    )
                if micro.read:
                    life.seen.append((number, "parameters", digest(self.params)))
        if not failed:
            self._update(step)
        self._zero(step.set_to_none)

    def _backward(
        self, micro: Micro, number: int, fault: tuple[str, str] | None
    ) -> bool:
        failures = []
        for r, life in enumerate(self.lives):
            for param, grad in zip(self.params, self.local[r], strict=True):
                param.grad = grad
            try:
                life.seen.append(
                    (number, "loss", run_micro(self.model, micro, r, fault))
                )
            except Fault:
                failures.append(r)
                life.faults += 1
            self.local[r] = [param.grad for param in self.params]
        assert len(failures) in (0, self.ranks)
        return bool(failures)

    def _reduce(self) -> None:
        for index, param in enumerate(self.params):
            mine = [grads[index] for grads in self.local]
            if all(grad is None for grad in mine) and self.reduced[index] is None:
                continue
            first, *others = (
                torch.zeros_like(param) if grad is None else grad for grad in mine
            )
            total = first.clone()
            for other in others:
                total += other
            total *= 1.0 / self.ranks
            before = self.reduced[index]
            self.reduced[index] = total if before is None else total + before
        self.local = [[None] * len(self.params) for _ in range(self.ranks)]

    def _update(self, step: Step) -> None:
        if any(grad is not None for grads in self.local for grad in grads):
            self._reduce()
        for group in self.optimizer.param_groups:
            group["lr"] = step.lr
        for param, grad in zip(self.held.parameters(), self.reduced, strict=True):
            param.grad = None if grad is None else grad.clone()
        if step.clip is not None:
            norm = self.optimizer.clip_grad_norm_(step.clip).item()
            for life in self.lives:
                life.norms.append(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for mine, updated in zip(self.params, self.held.parameters(), strict=True):
                mine.copy_(updated)
        self.foreseen, self.backwards = self.backwards or None, 0

    def _zero(self, set_to_none: bool) -> None:
        def zeroed(grad: Tensor | None) -> Tensor | None:
            return None if set_to_none or grad is None else torch.zeros_like(grad)

        self.local = [[zeroed(grad) for grad in grads] for grads in self.local]
        self.reduced = [zeroed(grad) for grad in self.reduced]


# ------------------------------------------------------------------- one abandoned step

FINE = zerokern.Buckets(bytes=1)
"""A bucket for each parameter: of some, a rank uses nothing."""


def after_an_abandoned_step(
    stage: int, uses: tuple[str, ...] | None, zero: tuple[str, bool], *, fine: bool
) -> dict[str, Tensor]:
    """Abandon a step that was reduced, and then went on under no_sync. Make another;
    return parameters and state.

    Args:
        stage: of the optimizer.
        uses: branches of the fork in the abandoned step, by rank; None: there is none.
        zero: who zeroes, and whether that sets to None.
        fine: many small buckets.
    """
    model = models.forked()
    optimizer = sharded(model, stage, **({"buckets": FINE} if fine else {}))
    tokens, targets = (models.share(t, rank(), world()) for t in models.batch(0))

    def backward(use: str) -> None:
        F.cross_entropy(
            model(tokens, (0, 1), use).flatten(0, 1), targets.flatten()
        ).backward()

    if uses is not None:
        backward(uses[rank()])
        with optimizer.no_sync():
            backward(uses[rank()])
    (model if zero[0] == "model" else optimizer).zero_grad(set_to_none=zero[1])
    backward("both")
    optimizer.step()
    return {**whole(model, optimizer), **state_of(model, optimizer)}


def step_without_a_gradient(
    stage: int, uses: tuple[str, ...], who: str, *, fine: bool
) -> dict[str, Tensor]:
    """Zero in place what was reduced, and step: gradients are zero. Return the
    moments."""
    model = models.forked()
    optimizer = sharded(model, stage, **({"buckets": FINE} if fine else {}))
    tokens, targets = (models.share(t, rank(), world()) for t in models.batch(0))
    F.cross_entropy(
        model(tokens, (0, 1), uses[rank()]).flatten(0, 1), targets.flatten()
    ).backward()
    (model if who == "model" else optimizer).zero_grad(set_to_none=False)
    optimizer.step()
    return {
        name: value
        for name, value in state_of(model, optimizer).items()
        if "exp_avg" in name
    }
