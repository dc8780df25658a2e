"""Stage 3: what backward needs of sharded parameters, as autograd itself tells it.

While a unit's forward runs, a parameter (or a view of one) that autograd saves for
backward is replaced by a reference to its place in the unit. When backward reads it,
the unit is gathered. So nothing has to be known of what a forward returns or keeps: a
dataclass, a cache, an intermediate, the graph of a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .units import Gathered, Unit, UnitBucket, UnitState

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""pack, and unpack, as of torch.autograd.graph.saved_tensors_hooks."""

_top = torch._C._autograd._top_saved_tensors_default_hooks
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks
_may_push = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


class Gatherer(Protocol):
    """Whoever gathers a unit when backward needs it."""

    def need(self, unit: Unit) -> None:
        """Have the unit's parameters whole."""


class _SavedParameter(NamedTuple):
    """A parameter that autograd has saved, without its memory."""

    unit: weakref.ref[Unit]
    bucket: weakref.ref[UnitBucket]
    param: weakref.ref[Tensor] | None
    """The leaf whose version counter it shares, if that can be told."""
    version: int
    updates: int
    """Of the unit, when it was saved."""
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class SavedParameters:
    """The hooks on saved tensors of one optimizer."""

    def __init__(self) -> None:
        self.gathered: Gathered = {}
        """The units that are whole; they enter themselves."""
        self._gatherer: weakref.ref[Gatherer] | None = None
        self.pushed: list[_Pushed] = []
        """Our hooks on torch's stack of them, in order."""

    def gather_by(self, gatherer: Gatherer) -> None:
        """Ask `gatherer`, which is held weakly, when backward reads a unit."""
        self._gatherer = weakref.ref(gatherer)

    # ---------------------------------------------------------------- forward

    def enter(self, module: nn.Module) -> None:
        """A unit's forward begins.

        Torch calls the innermost pair of hooks only. Ours go innermost wherever a unit
        is entered, and hand what is not ours to the pair that was there, be it of a
        checkpoint or of `save_on_cpu`. So a checkpoint sees the same tensors when it
        recomputes the unit as it saw the first time.
        """
        if not torch.is_grad_enabled() or not _may_push():
            return
        outer = _top(False)
        last = self.pushed[-1] if self.pushed else None
        if last is not None and outer is not None and outer[0] is last.pack:
            if module is last.module:
                last.enter()
            return
        pushed = _Pushed(self, module, outer)
        _push(pushed.pack, pushed.unpack)
        self.pushed.append(pushed)

    def leave(self, module: nn.Module) -> None:
        """A unit's forward has ended."""
        last = self.pushed[-1] if self.pushed else None
        if last is not None and module is last.module and last.leave():
            self.pushed.pop()
            _pop()

    def reset(self) -> None:
        """Outside of any forward: remove what is left of one that never came to its
        end, such as after a KeyboardInterrupt."""
        while self.pushed:
            pushed = self.pushed.pop()
            top = _top(False)
            if top is not None and top[0] is pushed.pack:
                _pop()

    def find(self, tensor: Tensor) -> _SavedParameter | None:
        """Return the reference to a tensor that is saved, if it is a parameter."""
        try:
            found = self.gathered.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse, or a wrapper of functorch
            return None
        if found is None:
            return None
        unit = found[0]()
        assert unit is not None
        leaf = tensor if tensor.grad_fn is None else tensor._base
        return _SavedParameter(
            *found,
            None if leaf is None else weakref.ref(leaf),
            tensor._version,
            unit.updates,
            int(tensor.storage_offset()),
            tensor.shape,
            tensor.stride(),
        )

    # ---------------------------------------------------------------- backward

    def bring(self, saved: _SavedParameter) -> Tensor:
        """Return the values of a parameter that was saved.

        Raises:
            RuntimeError: it was written to or updated since, or its optimizer is gone.
        """
        unit = saved.unit()
        bucket = saved.bucket()
        gatherer = None if self._gatherer is None else self._gatherer()
        if unit is None or bucket is None or gatherer is None:
            raise RuntimeError(
                f"backward needs a parameter of shape {tuple(saved.shape)} that is"
                " sharded, and the optimizer that held its shards is gone. Run backward"
                " before you drop the optimizer"
            )
        leaf = None if saved.param is None else saved.param()
        # A placeholder tells its version, too.
        version = saved.version if leaf is None else leaf._version
        if version != saved.version or unit.updates != saved.updates:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified"
                f" by an inplace operation: a parameter of shape {tuple(saved.shape)}"
                f" of unit {unit.title!r} was written to or updated between forward and"
                " backward"
            )
        if unit.state is not UnitState.WHOLE:
            gatherer.need(unit)
        assert bucket.whole is not None
        return bucket.whole.as_strided(saved.shape, saved.stride, saved.offset)


class _Pushed:
    """One pair of hooks on torch's stack, and the pair that was there before it."""

    def __init__(
        self, owner: SavedParameters, module: nn.Module, outer: Hooks | None
    ) -> None:
        this = weakref.ref(owner)
        self.module = module
        self._depth = 0

        def pack(tensor: Tensor) -> Any:
            saved = owner.find(tensor)
            if saved is not None:
                return saved
            if outer is not None:
                return outer[1], outer[0](tensor)
            # An output would keep its own graph alive.
            value = tensor if tensor.grad_fn is None else tensor.detach()
            return value, tensor._version

        def unpack(packed: Any) -> Tensor:
            if type(packed) is _SavedParameter:
                saved = this()
                if saved is None:
                    raise RuntimeError(
                        "backward needs parameters that are sharded, and the optimizer"
                        " that held their shards is gone. Run backward before you drop"
                        " the optimizer"
                    )
                return saved.bring(packed)
            if outer is not None:
                unpack_outer, value = packed
                tensor: Tensor = unpack_outer(value)
                return tensor
            return _checked(*packed)

        self.pack = pack
        self.unpack = unpack

    def enter(self) -> None:
        """The module is called inside of itself."""
        self._depth += 1

    def leave(self) -> bool:
        """A call of the module has ended. Return whether it was the outermost."""
        self._depth -= 1
        return self._depth < 0


def _checked(tensor: Tensor, version: int) -> Tensor:
    """Return a saved tensor, unless it was written to since. Torch itself does not look
    where there are hooks."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by"
            f" an inplace operation: [{tensor.type()} {list(tensor.shape)}] is at"
            f" version {tensor._version}; expected version {version} instead"
        )
    return tensor
