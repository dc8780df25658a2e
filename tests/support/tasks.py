"""What is trained of public libraries: models with their data, by name, under our
optimizer or under DistributedDataParallel and torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import real_models as real
import torch
from oracle import sharded
from real_models import Batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from unet import UNet, unet_block

STEPS, LR = 5, 1e-2
EPS = 1e-3
"""Of Adam, in both runs. Some gradients are zero but for rounding: a bias of
attention's keys moves all scores alike, one before a BatchNorm is subtracted again.
With 1e-8 Adam would blow 1e-9 of noise up to a step; so it is 1e-6 of one, and
`REDUCED_SUMS` holds for them too."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, on what."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch] = real.tokens
    """One rank's rows."""
    units: Callable[[nn.Module], bool] | None = None
    """Stage 3: as of `Buckets`."""
    unused: bool = False
    """Not every parameter has a gradient in every backward."""

    def model(self) -> nn.Module:
        """Return the same model every time, ready to train. No parameter is zero, lest
        it hide an update or a skip."""
        torch.manual_seed(0)
        model = self.build().train()
        with torch.no_grad():
            for param in model.parameters():
                if not param.any():
                    param.normal_(std=0.02)
        return model

    def rows(self, step: int, rank: int) -> Batch:
        """Return the same rows for the same step and rank."""
        return self.batch(torch.Generator().manual_seed(1000 * step + rank))


def recomputed(build: Callable[[], nn.Module], *, reentrant: bool) -> Task:
    """Return the task of a language model with checkpoints."""
    return Task(build=real.checkpointed(build, reentrant=reentrant))


def lora_with_checkpoints() -> nn.Module:
    """Return adapters on a model whose layers are recomputed."""
    return real.lora(real.checkpointed(real.gpt2, reentrant=True))


TASKS = {
    "gpt2": Task(build=real.gpt2),
    "gpt2, reentrant checkpoints": recomputed(real.gpt2, reentrant=True),
    "gpt2, checkpoints": recomputed(real.gpt2, reentrant=False),
    "llama": Task(build=real.llama),
    "llama, reentrant checkpoints": recomputed(real.llama, reentrant=True),
    "llama, checkpoints": recomputed(real.llama, reentrant=False),
    "mixtral": Task(build=real.mixtral),
    "qwen2_moe": Task(build=real.qwen2_moe),
    "switch": Task(build=real.switch, unused=True),
    "t5": Task(build=real.t5),
    "t5, by type": Task(build=real.t5, units=real.t5_block),
    "t5, reentrant checkpoints": recomputed(real.t5, reentrant=True),
    "t5, checkpoints": recomputed(real.t5, reentrant=False),
    "vit": Task(build=real.vit, batch=real.images),
    "resnet": Task(build=real.resnet, batch=real.images),
    "resnet, by type": Task(
        build=real.resnet, batch=real.images, units=real.resnet_layer
    ),
    "lora": Task(build=real.lora),
    "lora, reentrant checkpoints": Task(build=lora_with_checkpoints),
    "unet": Task(build=UNet, batch=real.noisy_images),
    "unet, by type": Task(build=UNet, batch=real.noisy_images, units=unet_block),
}


def prepared(
    task: Task, model: nn.Module, stage: int | None, **options: Any
) -> tuple[nn.Module, Any]:
    """Return what a script calls, and its optimizer. Stage None is that of
    DistributedDataParallel and torch's AdamW; options are of ours."""
    if stage is None:
        wrapped = DistributedDataParallel(
            model, find_unused_parameters=task.unused, broadcast_buffers=False
        )
        return wrapped, torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    return model, sharded(model, stage, lr=LR, eps=EPS, **options)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss, as the libraries form it."""
    output = model(**batch)
    return output if isinstance(output, Tensor) else output.loss


def train_step(
    task: Task, model: nn.Module, optimizer: Any, step: int, rank: int
) -> Tensor:
    """Make one step on a rank's rows of a batch; return the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, task.rows(step, rank))
    loss.backward()
    optimizer.step()
    return loss.detach()
