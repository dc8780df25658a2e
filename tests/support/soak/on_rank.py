"""A soak on a rank, and what it holds meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
from oracle import quiet_state_dict, rank, sharded, state_of, whole
from torch import Tensor

from soak.life import Fault, Life, deterministic, digest, evaluate, groups_of, run_micro
from soak.script import Micro, Step

PAGE = 4096


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


class Soak:
    """One rank's model and optimizer, and what was seen of them."""

    def __init__(self, stage: int) -> None:
        self.model = models.forked()
        self.optimizer: Any = sharded(self.model, stage, groups_of(self.model))
        self.transport = self.optimizer.coordinator.transport
        self.transport.poison = True
        self.life, self.memory = Life(), Memory()

    def run(
        self, steps: Sequence[Step], checkpoints: Sequence[int], probe_every: int
    ) -> None:
        """Run a script."""
        for number, step in enumerate(steps):
            updates = len(self.memory.roles)
            self._run_step(step, number)
            self.memory.peak.append(self.transport.peak_bytes)
            # The log itself grows up to 65,536 entries.
            self.optimizer.comm_log(clear=True)
            if number % probe_every == 0:
                self._probe(updated=len(self.memory.roles) > updates)
            if number + 1 in checkpoints:
                self.life.whole[number + 1] = {
                    **whole(self.model, self.optimizer),
                    **state_of(self.model, self.optimizer),
                }
        self.life.skipped = int(self.optimizer.skipped_steps)

    def _run_step(self, step: Step, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = step.lr
        held = self.memory.roles
        try:
            for micro in step.micros:
                fault = step.fault if micro is step.micros[-1] else None
                self._run_micro(micro, number, fault)
        except Fault:
            self.life.faults += 1
            self.memory.after_faults.append(self.optimizer.memory().buffers)
            held = self.memory.abandoned
        else:
            if step.clip is not None:
                norm = self.optimizer.clip_grad_norm_(step.clip)
                self.life.norms.append(norm.item())
            self.optimizer.step()

        zeroed: Any = self.model if step.zeroed_by_model else self.optimizer
        zeroed.zero_grad(set_to_none=step.set_to_none)
        held.append(vars(self.optimizer.memory()))
        if step.reload:
            self.optimizer.load_state_dict(quiet_state_dict(self.optimizer))

    def _run_micro(
        self, micro: Micro, number: int, fault: tuple[str, str] | None
    ) -> None:
        with self.optimizer.no_sync() if micro.no_sync else nullcontext():
            loss = run_micro(self.model, micro, rank(), fault)
        self.life.note(number, "loss", loss)
        if micro.evaluate:
            loss = evaluate(self.model, micro, rank())
            self.life.note(number, "evaluation", loss)
        if micro.read:
            with self.optimizer.full_params():
                checksum = digest(self.model.parameters())
            self.life.note(number, "parameters", checksum)

    def _probe(self, *, updated: bool) -> None:
        if updated:
            kept = sum(map(len, self.life.whole.values()))
            self.memory.tensors.append(tensors_of_python() - kept)
        self.memory.resident.append(resident_bytes())


def live(
    stage: int, steps: Sequence[Step], checkpoints: Sequence[int], probe_every: int = 10
) -> tuple[Life, Memory]:
    """Run a script on this rank."""
    gc.collect()
    gc.freeze()  # what was there before is not counted
    with deterministic():
        soak = Soak(stage)
        soak.run(steps, checkpoints, probe_every)
    gc.unfreeze()
    return soak.life, soak.memory


def tensors_of_python() -> int:
    gc.collect()
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
