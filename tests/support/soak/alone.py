"""A soak in one process that plays all ranks in turn."""

from __future__ import annotations

from collections.abc import Sequence

import models
import torch
from oracle import state_of, whole, world
from torch import Tensor

import zerokern
from soak.life import Fault, Life, deterministic, digest, evaluate, groups_of, run_micro
from soak.script import Micro, Step


class Oracle:
    """Plays all ranks in one process."""

    def __init__(self, stage: int, ranks: int) -> None:
        """Build.

        Args:
            stage: whose order of sums to follow. 2 and 3 are the same.
            ranks: to play.
        """
        assert world() == 1
        self.once_per_step = stage == 1
        self.ranks = ranks
        self.model = models.forked()
        """Where gradients are formed."""
        self.held = models.forked()
        """Where the optimizer updates."""
        self.optimizer = zerokern.AdamW(groups_of(self.held))
        self.params = list(self.model.parameters())
        self.local = self._no_gradients()
        """p.grad of each rank: what was not reduced yet."""
        self.reduced: list[Tensor | None] = [None] * len(self.params)
        self.backwards = 0
        self.foreseen: int | None = 1
        self.lives = [Life() for _ in range(ranks)]

    def _no_gradients(self) -> list[list[Tensor | None]]:
        return [[None] * len(self.params) for _ in range(self.ranks)]

    def run(self, steps: Sequence[Step], checkpoints: Sequence[int]) -> list[Life]:
        """Run a script; return what each rank must have seen."""
        with deterministic():
            for number, step in enumerate(steps):
                self._run_step(step, number)
                if number + 1 in checkpoints:
                    self._note_everything(number + 1)
        for life in self.lives:
            life.skipped = int(self.optimizer.skipped_steps)
        return self.lives

    def _note_everything(self, steps: int) -> None:
        params = whole(self.held, self.optimizer)
        state = state_of(self.held, self.optimizer)
        for life in self.lives:
            life.whole[steps] = {**params, **state}

    def _run_step(self, step: Step, number: int) -> None:
        failed = False
        for micro in step.micros:
            fault = step.fault if micro is step.micros[-1] else None
            failed = self._backward(micro, number, fault)
            if failed:
                break
            if not micro.no_sync:
                self.backwards += 1
                if not self.once_per_step or self.backwards == self.foreseen:
                    self._reduce()
            for of_rank, life in enumerate(self.lives):
                if micro.evaluate:
                    loss = evaluate(self.model, micro, of_rank)
                    life.note(number, "evaluation", loss)
                if micro.read:
                    life.note(number, "parameters", digest(self.params))
        if not failed:
            self._update(step)
        self._zero(step.set_to_none)

    def _backward(
        self, micro: Micro, number: int, fault: tuple[str, str] | None
    ) -> bool:
        """Return whether the user's code failed, as it does on all ranks or none."""
        failures = []
        for of_rank, life in enumerate(self.lives):
            for param, grad in zip(self.params, self.local[of_rank], strict=True):
                param.grad = grad
            try:
                loss = run_micro(self.model, micro, of_rank, fault)
                life.note(number, "loss", loss)
            except Fault:
                failures.append(of_rank)
                life.faults += 1
            self.local[of_rank] = [param.grad for param in self.params]
        assert len(failures) in (0, self.ranks)
        return bool(failures)

    def _reduce(self) -> None:
        for index, param in enumerate(self.params):
            grads = [of_rank[index] for of_rank in self.local]
            before = self.reduced[index]
            if before is None and all(grad is None for grad in grads):
                continue
            total = torch.zeros_like(param) if grads[0] is None else grads[0].clone()
            for grad in grads[1:]:
                total += torch.zeros_like(param) if grad is None else grad
            total *= 1.0 / self.ranks
            self.reduced[index] = total if before is None else total + before
        self.local = self._no_gradients()

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
