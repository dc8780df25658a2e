"""What an optimizer of zerokern stands for, in plain torch: whole states on every rank,
gradients averaged one by one. Slow, large, and simple enough to be believed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..memory import Memory

WIDE = (torch.float32, torch.float64)
"""dtypes of parameters that need no master weights."""


class Watcher(Protocol):
    """Whoever follows the steps of an optimizer."""

    def __call__(self, optimizer: PlainOptimizer, *, updated: bool) -> None:
        """The gradients of a step are final, or its update was made."""


class PlainOptimizer(Optimizer):
    """The methods that ours have beside torch's. All ranks must call them alike."""

    skipped_steps = 0
    """Steps skipped for gradients that are not finite, so far."""

    def __init__(
        self,
        params: Iterable[Any],
        *args: Any,
        stage: int = 1,
        model: nn.Module | None = None,
        process_group: Any = None,
        mesh: Any = None,
        precision: Any = None,
        buckets: Any = None,
        max_grad_norm: float | None = None,
        init: Any = None,
        **options: Any,
    ) -> None:
        """Take rank 0's parameters and buffers, as all optimizers of ours do.

        Raises:
            ValueError: a parameter is on the meta device.
        """
        super().__init__(params, *args, **options)
        self.stage, self.max_grad_norm, self.model = stage, max_grad_norm, model
        self.group = process_group if mesh is None else mesh.get_group()
        self._watcher: Watcher | None = None
        self.grad_norm = torch.zeros((), dtype=torch.float64)
        self._masters: dict[int, Tensor] = {}
        self._scale: Tensor | None = None
        """What the coming step's gradients were divided by."""
        tensors: list[Tensor] = list(self._members())
        if model is not None:
            tensors += list(model.buffers())
        for tensor in tensors:
            if tensor.is_meta:
                raise ValueError(
                    "ZEROKERN_CHECK runs the model in plain torch, and a parameter is"
                    " on the meta device; check a small model that is built outside of"
                    " torch.device('meta')"
                )
            self._from_first(tensor.detach())

    def watch(self, watcher: Watcher) -> None:
        """Call a function before and after every update."""
        self._watcher = watcher

    def take_state(self, packed: Mapping[str, Any]) -> None:
        """Go on from a full state dict of ours, of the same groups."""
        keys = [key for group in packed["param_groups"] for key in group["params"]]
        for param, key in zip(self._members(), keys, strict=True):
            entry = dict(packed["state"].get(key, {}))
            master = entry.pop("master", None)
            if master is not None:
                self._masters[id(param)] = master.to(param.device, copy=True)
            if any(isinstance(v, Tensor) and bool(v.any()) for v in entry.values()):
                self.state[param] = state = {}
                for name, value in entry.items():
                    device = "cpu" if name == "step" else param.device
                    state[name] = value.to(device, copy=True)

    def _members(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    @property
    def world(self) -> int:
        """Ranks whose gradients are averaged."""
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    def _from_first(self, tensor: Tensor) -> None:
        if self.world > 1 and tensor.numel():
            source = 0
            if self.group is not None:
                source = dist.get_global_rank(self.group, 0)
            dense = tensor.contiguous()
            dist.broadcast(dense, source, group=self.group)
            tensor.copy_(dense)

    # ---------------------------------------------------------------- gradients

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average every p.grad over the ranks; where only others have one, zeros count
        as this rank's. Once more changes nothing."""
        members = list(self._members())
        if self.world == 1 or not members:
            return
        used = torch.tensor(
            [float(param.grad is not None) for param in members],
            device=members[0].device,
        )
        dist.all_reduce(
            used,
            dist.ReduceOp.MAX,
            group=self.group,
        )
        for param, is_used in zip(members, used.tolist(), strict=True):
            if is_used:
                self._average(param)

    def _average(self, param: nn.Parameter) -> None:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        total = param.grad.float().contiguous()
        dist.all_reduce(total, group=self.group)
        param.grad.copy_(total / self.world)

    def unscale_(self, loss_scale: Tensor) -> Tensor:
        """Divide the gradients by a loss scale, once per step. Return whether any is
        not finite, as 1.0 or 0.0: fp32 [1]."""
        self.synchronize()
        if self._scale is None:
            self._scale = loss_scale
            for grad in self._gradients():
                grad.div_(loss_scale.to(grad.device))
        finite = torch.tensor([bool(self.get_total_norm().isfinite())])
        return (~finite).float().to(loss_scale.device)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._members() if p.grad is not None]

    def get_total_norm(
        self,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Return the total norm of the averaged gradients."""
        self.synchronize()
        grads = [grad.float() for grad in self._gradients()]
        return nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite)

    def clip_grad_norm_(
        self,
        max_norm: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the total norm of the averaged gradients."""
        norm = self.get_total_norm(norm_type, error_if_nonfinite)
        nn.utils.clip_grads_with_norm_(list(self._members()), max_norm, norm)
        return norm

    def clip_grad_value_(
        self,
        clip_value: float,
        foreach: bool | None = None,
    ) -> None:
        """Clamp every element of the averaged gradients."""
        self.synchronize()
        nn.utils.clip_grad_value_(list(self._members()), clip_value)

    def full_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return a parameter's averaged gradient, fp32."""
        self.synchronize()
        return None if param.grad is None else param.grad.float().clone()

    def local_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return all of it, flat: nothing is sharded here."""
        grad = self.full_grad(param)
        return None if grad is None else grad.flatten()

    # ---------------------------------------------------------------- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average, clip, and update like torch, with fp32 master weights of 16-bit
        parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.max_grad_norm is not None:
            self.clip_grad_norm_(self.max_grad_norm)
        self.grad_norm = self.get_total_norm().double()
        self._tell(updated=False)
        if self.grad_norm.isfinite():
            self._update()
        else:
            self.skipped_steps += 1
        self._scale = None
        self._tell(updated=True)
        return loss

    def _tell(self, *, updated: bool) -> None:
        if self._watcher is not None:
            self._watcher(self, updated=updated)

    def _update(self) -> None:
        narrow = {}
        for param in self._members():
            if param.grad is not None and param.dtype not in WIDE:
                data, grad = param.data, param.grad
                narrow[param] = data, grad
                param.grad = None
                param.data = self._master_of(param)
                param.grad = grad.float()
        super().step()
        for param, (data, grad) in narrow.items():
            param.grad = None
            data.copy_(param.data)
            param.data, param.grad = data, grad

    def _master_of(self, param: nn.Parameter) -> Tensor:
        """Return the master weights, which follow what was written to the parameter."""
        master = self._masters.setdefault(id(param), param.detach().float())
        written = master.to(param.dtype) != param
        master[written] = param.detach().float()[written]
        return master

    # ------------------------------------------------------------ what ours have, too

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients are averaged at the step in any case."""
        return nullcontext()

    @contextmanager
    def full_params(self) -> Iterator[None]:
        """Parameters are whole in any case."""
        with torch.no_grad():
            yield

    def join(self) -> AbstractContextManager[None]:
        """Refuse: ranks that are out of batches would not average.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "ZEROKERN_CHECK cannot follow join(); check with as many batches on every"
            " rank, outside of it"
        )

    def register_forward_method(
        self,
        module: nn.Module,
        name: str,
    ) -> None:
        """Methods find their parameters in any case."""

    def full_state_dict(self, *, to: int | None = None) -> dict[str, Any]:
        """Return torch's state dict."""
        return self.state_dict()

    def consolidate_state_dict(self, to: int = 0) -> None:
        """The state is whole in any case."""

    def metrics(self) -> dict[str, float]:
        """Return what a log would show, with nothing sent."""
        return {
            "step": 0.0,
            "grad_norm": float(self.grad_norm),
            "clip_coefficient": 1.0,
            "skipped_steps": self.skipped_steps,
            "loss_scale": 1.0,
            "bytes_sent": 0,
            "wait_ms": 0.0,
        }

    def memory(self) -> Memory:
        """Nothing is held by us."""
        return Memory(
            parameters=0,
            gradients=0,
            master=0,
            moments=0,
            buffers=0,
            tables=0,
        )

    def comm_log(self, *, clear: bool = False) -> tuple[Any, ...]:
        """Nothing is sent by us."""
        return ()


class PlainAdam(PlainOptimizer, torch.optim.Adam):
    """torch's Adam."""


class PlainAdamW(PlainOptimizer, torch.optim.AdamW):
    """torch's AdamW."""


class PlainSGD(PlainOptimizer, torch.optim.SGD):
    """torch's SGD."""


class LionRule(Optimizer):
    """Lion (Chen et al., arXiv:2302.06675), which torch has not."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {**options, "maximize": maximize})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step by the sign of an interpolation, then move the moment."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = -param.grad if group["maximize"] else param.grad
                state = self.state[param]
                moment = state.setdefault("exp_avg", torch.zeros_like(param))
                direction = torch.lerp(grad, moment, beta1).sign()
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(direction * group["lr"])
                moment.lerp_(grad, 1 - beta2)


class PlainLion(PlainOptimizer, LionRule):
    """Lion."""


PLAIN: Mapping[str, type[PlainOptimizer]] = {
    "Adam": PlainAdam,
    "AdamW": PlainAdamW,
    "SGD": PlainSGD,
    "Lion": PlainLion,
}
"""By the names of our classes."""
