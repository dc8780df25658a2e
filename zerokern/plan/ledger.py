"""Bytes of live tensors: how many, when most, and what they were. Of real tensors as of
fake ones."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NOTED = 1.01
"""What lives is listed anew when a peak is higher than the listed one by this
factor."""


@dataclass
class Peak:
    """The most bytes that were live at once."""

    bytes: int = 0
    gathered: int = 0
    """Of these, units whose parameters are whole for a while."""
    buckets: int = 0
    """Of these, buckets and chunks of gradients under way."""
    where: str = ""
    """The phase, and the operation that reached it."""
    holders: Mapping[str, int] = field(default_factory=dict)
    """Bytes by what made them, largest first; within a percent of the peak."""


class Ledger(TorchDispatchMode):
    """Counts the storages of every tensor that an operation returns inside of it, until
    they die or are resized."""

    def __init__(
        self,
        on_operation: (
            Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None] | None
        ) = None,
    ) -> None:
        """Prepare.

        Args:
            on_operation: is told of every operation, its arguments and what it
                returned.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.gathered = 0
        self.buckets = 0
        """Of these, scratch memory of zerokern."""
        self.peak = Peak()
        self.outside = "forward"
        """The phase, while no backward pass runs."""
        self.timeline: list[tuple[str, int]] = []
        """(phase, live bytes) after every operation that changed them."""
        self._on_operation = on_operation
        self._sizes: dict[int, tuple[int, str]] = {}
        """Bytes and maker of each storage, by its address."""
        self._noted = 0
        self._modules: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> Ledger:
        self._stack.enter_context(_resizing(self._resized))
        for hook in (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._stack.callback(hook.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # What may be read was decided above.
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.count(tensor, str(func._opname))
        if self._on_operation is not None:
            self._on_operation(func, args, kwargs, out)
        return out

    @property
    def phase(self) -> str:
        """The phase: "backward", or the one that was set."""
        return "backward" if torch._C._current_graph_task_id() != -1 else self.outside

    def count(self, tensor: Tensor, maker: str) -> None:
        """Take a tensor's storage into account, once, until it dies."""
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        # Else it borrows another's memory.
        if key not in self._sizes and storage.resizable():
            title = f"{maker} in {self._modules[-1]}" if self._modules else maker
            self._sizes[key] = 0, f"{self.phase}: {title}"
            weakref.finalize(storage, self._died, key).atexit = False
            self._set(key, storage.nbytes())

    def enter(self, phase: str) -> None:
        """Say what is going on from now on, while no backward pass is."""
        self.outside = phase

    def note_scratch(self, change: int, *, gathered: bool) -> None:
        """Count scratch memory of zerokern: bytes taken, or given back if negative."""
        if gathered:
            self.gathered += change
        else:
            self.buckets += change

    def reset_peak(self) -> None:
        """Look for the peak from now on."""
        self.peak = Peak()
        self._noted = 0
        self._check_peak("")

    def _set(self, key: int, size: int) -> None:
        before, maker = self._sizes[key]
        self._sizes[key] = size, maker
        self.live += size - before
        if size != before:
            self.timeline.append((self.phase, self.live))
        self._check_peak(maker)

    def _check_peak(self, maker: str) -> None:
        if self.live <= self.peak.bytes:
            return
        holders = self.peak.holders
        if self.live > self._noted * NOTED:
            self._noted = self.live
            holders = self.holders()
        self.peak = Peak(self.live, self.gathered, self.buckets, maker, holders)

    def holders(self) -> dict[str, int]:
        """Return the live bytes by what made them, largest first."""
        found: Counter[str] = Counter()
        for size, maker in self._sizes.values():
            found[maker] += size
        return dict(found.most_common())

    def _died(self, key: int) -> None:
        size, _ = self._sizes.pop(key)
        self.live -= size
        if size:
            self.timeline.append((self.phase, self.live))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            self._set(storage._cdata, storage.nbytes())

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._modules.append(type(module).__name__)

    def _leave_module(
        self,
        module: nn.Module,
        args: Any,
        output: Any,
    ) -> None:
        self._modules.pop()


@contextmanager
def _resizing(told: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Be told of storages that are resized, which no operation shows."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        original(storage, size)
        told(storage)
        return storage

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
        yield
