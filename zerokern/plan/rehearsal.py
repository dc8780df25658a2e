"""A rank of a world that is not there: fake tensors, a fake process group, and a record
of what would be done."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed import device_mesh
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .. import pretend
from .ledger import Ledger


@dataclass
class Work:
    """Operations of autograd, or a kernel of ours, between two collectives."""

    phase: str
    flops: int = 0
    bytes: int = 0
    """Read and written by element-wise operations, if nothing stays in a cache. Matrix
    products are bound by FLOPs."""
    operations: int = 0

    def add(self, *, flops: int = 0, bytes: int = 0) -> None:
        """Count one more operation."""
        self.operations += 1
        self.flops += flops
        self.bytes += bytes


@dataclass(frozen=True)
class Launch:
    """A collective starts."""

    number: int
    op: str
    group: int
    """Ranks."""
    sent: int
    """Bytes that this rank sends."""


@dataclass(frozen=True)
class Wait:
    """The rank waits for a collective."""

    number: int


@dataclass
class Trace:
    """The work of a rank, in order."""

    events: list[Work | Launch | Wait] = field(default_factory=list)

    def work(self, phase: str) -> Work:
        """Return the work under way, a new one where a collective came between."""
        last = self.events[-1] if self.events else None
        if not isinstance(last, Work) or last.phase != phase:
            last = Work(phase)
            self.events.append(last)
        return last

    def flops(self) -> int:
        """Return the floating-point operations of all work; a multiplication and an
        addition are two."""
        return sum(event.flops for event in self.events if isinstance(event, Work))


def _grouped_mm_flop(
    a: Tensor, b: Tensor, *args: Any, out_val: Tensor, **kwargs: Any
) -> int:
    """Count the products of experts with their tokens, or of the tokens with their
    gradients, an equal share each."""
    flops = 2 * out_val.numel() * a.shape[-1]
    return flops // out_val.shape[0] if a.dim() == b.dim() == 2 else flops


aten = torch.ops.aten
FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        aten._scaled_dot_product_flash_attention
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
    aten._grouped_mm: _grouped_mm_flop,
}
"""Formulas of torch's counter, and of what it leaves out. Attention counts whole,
causal or not, as usual."""

LOGGER = logging.getLogger(FakeTensorMode.__module__)
EXCEPTIONS = frozenset({"any", "isnan", "isinf"})
"""Operations whose answer is no, where values are not known."""


class Rehearsal:
    """Inside of it this process is one rank of a world of any size, tensors are fake,
    and everything is recorded.

    Only one at a time, and not beside a real process group: zerokern and the user's
    code find the fake one as the default group.
    """

    def __init__(self, world: int, rank: int = 0) -> None:
        """Prepare.

        Args:
            world: ranks.
            rank: which one this is.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < world:
            raise ValueError(
                f"rank {rank} of a world of {world}: it must be from 0 to {world - 1}"
            )
        self.world = world
        self.rank = rank
        self.trace = Trace()
        self.ledger = Ledger(self._on_operation)
        self._launched = 0
        self._stack = ExitStack()

    def __enter__(self) -> Rehearsal:
        if dist.is_initialized():
            raise RuntimeError(
                "a process group is initialised, and a dry run brings its own; run it"
                " in a process of its own, or call"
                " torch.distributed.destroy_process_group() first"
            )
        dist.init_process_group(
            "fake", store=FakeStore(), rank=self.rank, world_size=self.world
        )
        self._stack.callback(dist.destroy_process_group)
        self._stack.enter_context(mock.patch("torch.utils.swap_tensors", _swap))
        for owner, name in _MESHES:
            self._stack.enter_context(
                mock.patch.object(owner, name, _with_values(getattr(owner, name)))
            )
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        self._stack.enter_context(_Values())  # type: ignore[no-untyped-call]
        self._stack.enter_context(self.ledger)
        self._stack.enter_context(pretend.listening(self))
        # What it says is in exceptions, too.
        self._stack.enter_context(mock.patch.object(LOGGER, "disabled", True))
        for hook in (
            register_optimizer_step_pre_hook(lambda *_: self._begin("step")),
            register_optimizer_step_post_hook(lambda *_: self._begin("forward")),
        ):
            self._stack.callback(hook.remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _begin(self, phase: str) -> None:
        self.ledger.enter(phase)

    def record(self) -> Trace:
        """Return what was done since the last call."""
        done, self.trace = self.trace, Trace()
        return done

    # ----------------------------------------------------------------- what is recorded

    def _on_operation(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        if not _takes_time(func, out):
            return
        work = self.trace.work(self.ledger.phase)
        count = FLOPS.get(func._overloadpacket)
        if count is not None:
            work.add(flops=count(*args, **kwargs, out_val=out))
            return
        values = tree_leaves((args, kwargs, out))
        work.add(bytes=sum(t.nbytes for t in values if isinstance(t, Tensor)))

    def on_kernel(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Record a kernel of ours."""
        work = self.trace.work(self.ledger.phase)
        work.add(bytes=sum(tensor.nbytes for tensor in tensors))

    def on_launch(
        self,
        op: str,
        group: int,
        sent: int,
    ) -> int:
        """Record the start of a collective."""
        self._launched += 1
        self.trace.events.append(Launch(self._launched, op, group, sent))
        return self._launched

    def on_wait(self, transfer: int) -> None:
        """Record a wait."""
        self.trace.events.append(Wait(transfer))

    def on_scratch(self, change: int, *, gathered: bool) -> None:
        """Record scratch memory."""
        self.ledger.note_scratch(change, gathered=gathered)


def _takes_time(func: Any, out: Any) -> bool:
    """Return whether an operation computes: views, bare memory, questions (`device`)
    and marks of profilers do not."""
    if func.is_view or func._opname == "_unsafe_view" or "empty" in func._opname:
        return False
    return any(isinstance(value, Tensor) for value in tree_leaves(out))


def _with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs outside of the rehearsal's modes, on tensors that
    have values."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


_MESHES = (
    (device_mesh, "init_device_mesh"),
    (dist, "init_device_mesh"),
    (device_mesh.DeviceMesh, "__init__"),
    (device_mesh.DeviceMesh, "__getitem__"),
    (device_mesh.DeviceMesh, "_flatten"),
)
"""Code of torch that reads the ranks of a mesh from a tensor."""


def _swap(param: Tensor, applied: Tensor) -> None:
    """Do for `model.bfloat16()` what torch's own does, and refuses for fake
    parameters."""
    param.data = applied.data


class _Values(TorchDispatchMode):
    """Answers for values that nobody has computed: numbers are 1, conditions hold, but
    nothing is an exception to them (`any`, `isnan`, `isinf`), and tensors are equal.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        try:
            out = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is torch.ops.aten.equal.default:
                return True
            if func is torch.ops.aten._local_scalar_dense.default:
                dtype = args[0].dtype
                if dtype == torch.bool:
                    return not _is_exception(args[0])
                return 1.0 if dtype.is_floating_point else 1
            raise
        except DynamicOutputShapeException as error:
            raise ValueError(
                f"the size of what {func} returns depends on values, and a rehearsal"
                " has none (mixtures of experts do so); give every expert the same"
                " share of tokens there, by a mask or a fixed capacity"
            ) from error
        if func._opname in EXCEPTIONS or (
            func._opname == "logical_not" and not _is_exception(args[0])
        ):
            out.is_exception = True
        return out


def _is_exception(condition: Tensor) -> bool:
    return getattr(condition, "is_exception", False)
