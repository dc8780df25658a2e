"""The systems compared: each a function from a model to a Peer. To add one, write the
function and name it in PEERS.

In fp32 all of them do the same. In bf16 each does what its users do: DDP computes under
autocast over fp32 parameters; FSDP2 keeps fp32 shards, computes in bf16 and reduces in
fp32; zerokern has a bf16 model and fp32 master weights.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .model import GPT

ADAMW: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
}
ITEMSIZE = {"fp32": 4, "bf16": 2}


class Peer(ABC):
    """A model, an optimizer, and how to train with them."""

    module: Callable[..., Tensor]
    optimizer: Any
    gradient_bytes: int = 4
    """Bytes per element of a gradient on the wire."""
    parameter_bytes: int = 4
    gathers: int = 0
    """How often a step sends all parameters, if nothing is sent twice; gradients go
    once as a reduce-scatter."""

    def context(self) -> AbstractContextManager[Any]:
        """Return what a forward pass runs in."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass; afterwards gradients may or may not be reduced
        already."""
        loss.backward()

    def step(self) -> None:
        """Update the parameters."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()

    @abstractmethod
    def full_params(self) -> dict[str, Tensor]:
        """Return the fp32 parameters (master weights where there are any) by name. All
        ranks call it."""

    def logged_bytes(self) -> int | None:
        """Return the bytes per step that this system says it has sent, where it
        does."""
        return None

    def ideal_bytes(self, numel: int, world: int) -> float:
        """Return the least that a rank must send in a step."""
        return (
            numel
            * (self.gradient_bytes + self.gathers * self.parameter_bytes)
            * (world - 1)
            / world
        )


class Ddp(Peer):
    """DistributedDataParallel with fused AdamW on every rank, or with
    ZeroRedundancyOptimizer."""

    # An all-reduce is a reduce-scatter and an all-gather of gradients; ZeRO-1 gathers
    # parameters instead.
    gathers = 1

    def __init__(
        self,
        model: GPT,
        dtype: str,
        *,
        bucket_view: bool = False,
        sharded: bool = False,
    ) -> None:
        self.model, self.autocast = model, dtype == "bf16"
        self.module = DistributedDataParallel(
            model, gradient_as_bucket_view=bucket_view
        )
        if sharded:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            self.optimizer = ZeroRedundancyOptimizer(
                model.parameters(),
                torch.optim.AdamW,
                parameters_as_bucket_view=True,
                fused=True,
                **ADAMW,
            )
        else:
            self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast)

    def full_params(self) -> dict[str, Tensor]:
        return _copies(self.model)


class Fsdp2(Peer):
    """fully_shard on every block and on the root; stage 2 keeps the parameters whole
    from forward to backward."""

    def __init__(self, model: GPT, dtype: str, *, stage: int) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if dtype == "bf16":
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(
                block, mesh=mesh, mp_policy=policy, reshard_after_forward=stage == 3
            )
        self.module = fully_shard(
            model, mesh=mesh, mp_policy=policy, reshard_after_forward=stage == 3
        )
        self.model, self.gathers, self.parameter_bytes = (
            model,
            stage - 1,
            ITEMSIZE[dtype],
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def full_params(self) -> dict[str, Tensor]:
        return {
            name: param.detach().full_tensor()
            for name, param in self.model.named_parameters()
        }  # type: ignore[attr-defined]


class Zerokern(Peer):
    """This project."""

    def __init__(self, model: GPT, dtype: str, *, stage: int) -> None:
        import zerokern

        self.model = self.module = (
            model.to(torch.bfloat16) if dtype == "bf16" else model
        )
        self.gradient_bytes = self.parameter_bytes = ITEMSIZE[dtype]
        self.gathers = {1: 1, 2: 1, 3: 2}[stage]
        self.optimizer = zerokern.AdamW(
            model.parameters(), stage=stage, model=model, **ADAMW
        )

    def full_params(self) -> dict[str, Tensor]:
        with self.optimizer.full_params():
            params = _copies(self.model)
        state = self.optimizer.full_state_dict()["state"]
        for position, name in enumerate(params):
            params[name] = state[position].get("master", params[name])
        return params

    def logged_bytes(self) -> int | None:
        last = max(call.step for call in self.optimizer.comm_log())
        return sum(
            call.bytes for call in self.optimizer.comm_log() if call.step == last
        )


class Flat(Peer):
    """A yardstick: the plainest ZeRO-1, one flat buffer exchanged after backward. No
    buckets, no overlap; fp32."""

    gathers = 1

    def __init__(self, model: GPT, dtype: str) -> None:
        self.model = self.module = model
        params = list(model.parameters())
        rank, self.world = dist.get_rank(), dist.get_world_size()
        shard = -(-sum(p.numel() for p in params) // self.world)
        self.weights, self.grads = torch.zeros(2, self.world, shard)
        self.received = torch.empty(self.world - 1, shard)
        start = 0
        for param in params:
            window = slice(start, start + param.numel())
            self.weights.view(-1)[window].copy_(param.detach().view(-1))
            param.data = self.weights.view(-1)[window].view(param.shape)
            param.grad = self.grads.view(-1)[window].view(param.shape)
            start += param.numel()
        self.others = [r for r in range(self.world) if r != rank]
        self.own = nn.Parameter(self.weights[rank])
        self.own.grad = self.grads[rank]
        self.optimizer = torch.optim.AdamW([self.own], fused=True, **ADAMW)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self._exchange([self.grads[r] for r in self.others], list(self.received))
        assert self.own.grad is not None
        for chunk in self.received:
            self.own.grad.add_(chunk)
        self.own.grad.mul_(1 / self.world)

    def step(self) -> None:
        self.optimizer.step()
        self._exchange(
            [self.own.detach()] * len(self.others),
            [self.weights[r] for r in self.others],
        )

    def zero_grad(self) -> None:
        self.grads.zero_()

    def full_params(self) -> dict[str, Tensor]:
        return _copies(self.model)

    def _exchange(self, sends: list[Tensor], receives: list[Tensor]) -> None:
        works = [
            dist.isend(tensor, r) for tensor, r in zip(sends, self.others, strict=True)
        ]
        works += [
            dist.irecv(tensor, r)
            for tensor, r in zip(receives, self.others, strict=True)
        ]
        for work in works:
            work.wait()  # type: ignore[union-attr]


class Deepspeed(Peer):
    """DeepSpeed with torch's fused AdamW inside, buckets of 25 MiB as in DDP."""

    def __init__(self, model: GPT, dtype: str, *, stage: int) -> None:
        import deepspeed  # type: ignore[import-not-found]

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": dtype == "bf16"},
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": 6_553_600,
                "allgather_bucket_size": 6_553_600,
            },
        }
        inner = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        self.model = model
        self.module, *_ = deepspeed.initialize(
            model=model, optimizer=inner, config=config
        )
        self.gathers, self.parameter_bytes = {1: 1, 2: 1, 3: 2}[stage], ITEMSIZE[dtype]
        self.gradient_bytes = ITEMSIZE[dtype]

    def backward(self, loss: Tensor) -> None:
        self.module.backward(loss)  # type: ignore[attr-defined]

    def step(self) -> None:
        self.module.step()  # type: ignore[attr-defined]

    def zero_grad(self) -> None:
        """Nothing: the engine's step does it."""

    def full_params(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param  # type: ignore[import-not-found]

        return {
            name: safe_get_full_fp32_param(param).clone()
            for name, param in self.model.named_parameters()
        }


class Fairscale(Peer):
    """fairscale's OSS under DDP (stage 1) or under its ShardedDataParallel (stage
    2)."""

    gathers = 1

    def __init__(self, model: GPT, dtype: str, *, stage: int) -> None:
        from fairscale.nn.data_parallel import ShardedDataParallel  # type: ignore[import-not-found]
        from fairscale.optim.oss import OSS  # type: ignore[import-not-found]

        self.model, self.stage, self.autocast = model, stage, dtype == "bf16"
        self.optimizer = OSS(
            params=model.parameters(), optim=torch.optim.AdamW, fused=True, **ADAMW
        )
        self.module = (
            DistributedDataParallel(model)
            if stage == 1
            else ShardedDataParallel(model, self.optimizer)
        )

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast)

    def zero_grad(self) -> None:
        # Its reduce buckets are the gradients: once these are set to None it goes on
        # reducing stale ones.
        self.optimizer.zero_grad(set_to_none=self.stage == 1)

    def full_params(self) -> dict[str, Tensor]:
        return _copies(self.model)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: param.detach().float().clone() for name, param in model.named_parameters()
    }


BASELINE = "ddp"
PEERS: Mapping[str, Callable[[GPT, str], Peer]] = {
    "ddp": Ddp,
    "ddp+gbv": partial(Ddp, bucket_view=True),
    "zero1": partial(Ddp, sharded=True),
    "fsdp2:2": partial(Fsdp2, stage=2),
    "fsdp2:3": partial(Fsdp2, stage=3),
    "zerokern:1": partial(Zerokern, stage=1),
    "zerokern:2": partial(Zerokern, stage=2),
    "zerokern:3": partial(Zerokern, stage=3),
    "flat": Flat,
    **{f"deepspeed:{stage}": partial(Deepspeed, stage=stage) for stage in (1, 2, 3)},
    **{f"fairscale:{stage}": partial(Fairscale, stage=stage) for stage in (1, 2)},
}
"""Names as on the command line and in the tables; the number is the ZeRO stage."""


def why_not(peer: str, dtype: str) -> str | None:
    """Return why a peer cannot run here, or None if it can."""
    package = peer.partition(":")[0]
    if (
        package in ("deepspeed", "fairscale")
        and importlib.util.find_spec(package) is None
    ):
        return f"{package} is not installed"
    if peer == "flat" and dtype != "fp32":
        return "this yardstick is fp32 only"
    return None
