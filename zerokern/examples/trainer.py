"""One training run, plain or sharded: the loop is the same, only the optimizer
differs."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from zerokern import AdamW, Precision

from .baseline import PlainAdamW
from .gpt import GPT, Shape
from .options import Options
from .progress import Progress
from .report import Run
from .text import Text
from .theory import StateBytes, sent_bytes, state_bytes

MAX_NORM = 1.0
VALIDATION_WINDOWS = 256
PROMPT = b"The "
SAMPLE_BYTES = 240


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a linear warm-up, then half a cosine from
    1 to 0.1."""
    warm_up = max(1, steps // 10)
    return min(1.0, (step + 1) / warm_up) * (
        0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps))
    )


class Trainer:
    """A model, its optimizer and its part of every batch.

    Args:
        options: what the user chose.
        text: what is learnt from.
        device: where this rank computes.
        stage: 0 for torch's AdamW in this process alone, else the ZeRO stage, over all
            ranks.
    """

    def __init__(
        self, options: Options, text: Text, device: torch.device, *, stage: int
    ) -> None:
        self.options = options
        self.text = text
        self.device = device
        self.stage = stage
        self.rank, self.world = (
            (dist.get_rank(), dist.get_world_size()) if stage else (0, 1)
        )
        torch.manual_seed(options.seed)
        self.model = GPT(Shape()).to(device, options.torch_dtype)
        self.numel = sum(parameter.numel() for parameter in self.model.parameters())
        self.optimizer = self._optimizer(self.model)
        self.scheduler = LambdaLR(
            self.optimizer, lambda step: schedule(step, options.steps)
        )

    def _optimizer(self, model: nn.Module) -> AdamW | PlainAdamW:
        options: dict[str, Any] = {
            "lr": self.options.lr,
            "betas": (0.9, 0.95),
            "weight_decay": 0.1,
        }
        if self.stage == 0:
            return PlainAdamW(model.parameters(), **options)
        options["precision"] = self.options.precision
        if self.stage == 3:
            return AdamW(model.parameters(), **options, stage=3, model=model)
        return AdamW(model.parameters(), **options, stage=self.stage)

    def run(self, progress: Progress) -> Run:
        """Train, validate, and return what was measured."""
        name = f"ZeRO-{self.stage}" if self.stage else "plain AdamW"
        steps = self.options.steps
        tokens = self.options.batch * self.text.context
        losses = []
        seconds = []
        if isinstance(self.optimizer, AdamW):
            # The exchanges of construction are not part of a step.
            self.optimizer.comm_log(clear=True)
        progress.start(name, steps)
        for step in range(steps):
            started = time.perf_counter()
            losses.append(self._step(step))
            seconds.append(time.perf_counter() - started)
            progress.advance(losses[-1], tokens / seconds[-1])
        sent = self._sent() / steps
        median = statistics.median(seconds)
        size = {
            "world": self.world,
            "stage": self.stage,
            "itemsize": self.options.torch_dtype.itemsize,
        }
        formats = self.options.precision if self.stage else Precision()
        return Run(
            name=name,
            losses=losses,
            validation_loss=self._validate(),
            step_ms=1e3 * median,
            tokens_per_second=tokens / median,
            state=self.state,
            state_theory=state_bytes(self.numel, **size, precision=formats),
            sent=sent,
            sent_theory=sent_bytes(self.numel, **size),
        )

    def _step(self, step: int) -> float:
        """Do one optimizer step; return the loss of the global batch before it."""
        batch = self.text.batch(step, size=self.options.batch, seed=self.options.seed)
        loss = self.model.loss(batch[self.rank :: self.world].to(self.device))
        loss.backward()
        self.optimizer.clip_grad_norm_(MAX_NORM)
        if step == self.options.steps - 1:
            # Gradients are part of it, so before they are dropped.
            self.state = self._state()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return self._mean(loss)

    @torch.no_grad()
    def _validate(self) -> float:
        """Return the loss over text that was not trained on, each rank its part."""
        windows = self.text.validation_windows(VALIDATION_WINDOWS)
        whole = len(windows) - len(windows) % dist.get_world_size()
        return self._mean(
            self.model.loss(windows[:whole][self.rank :: self.world].to(self.device))
        )

    def sample(self) -> bytes:
        """Return text that the model writes. All ranks must call it; only the first one
        writes."""
        with self.optimizer.full_params():
            return (
                self.model.generate(PROMPT, SAMPLE_BYTES, seed=self.options.seed)
                if self.rank == 0
                else b""
            )

    def _mean(self, loss: Tensor) -> float:
        """Return the mean over the ranks of this run; their parts of a batch are
        equally large."""
        mean = loss.detach().clone()
        if self.world > 1:
            dist.all_reduce(mean)
        return mean.item() / self.world

    def _state(self) -> StateBytes:
        """Return the bytes of model state that this rank holds now."""
        if isinstance(self.optimizer, PlainAdamW):
            return self.optimizer.state_bytes()
        held = self.optimizer.memory()
        return StateBytes(
            parameters=held.parameters,
            gradients=held.gradients,
            master=held.master,
            moments=held.moments,
        )

    def _sent(self) -> int:
        """Return the bytes that the optimizer sent from this rank since
        construction."""
        if isinstance(self.optimizer, PlainAdamW):
            return 0
        return sum(call.bytes for call in self.optimizer.comm_log())
