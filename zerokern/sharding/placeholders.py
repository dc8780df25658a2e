"""Placeholders: tensors whose values are elsewhere. They tell their shape, and say what
to do when somebody reads them.

Two kinds. A gradient that was reduced leaves a `ReducedGradient` in p.grad. A parameter
changes its class while it is sharded (stage 3) or being gathered (stages 1 and 2), as
torch's own uninitialised parameters do: the object stays the same, so param groups,
ties and whoever else refers to it never notice, and torch calls `__torch_function__`
for whatever reads it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..pretend import address, is_fake
from .accumulation import PASSES, run_pass

TELLING = frozenset(
    {
        "__get__",
        "__hash__",
        "__len__",
        "__repr__",
        "__str__",
        "data_ptr",
        "detach_",
        "dim",
        "element_size",
        "empty_like",
        "full_like",
        "get_device",
        "has_names",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_shared",
        "is_signed",
        "ndimension",
        "nelement",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "numel",
        "ones_like",
        "rand_like",
        "randint_like",
        "randn_like",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "size",
        "storage_offset",
        "stride",
        "type",
        "untyped_storage",
        "zeros_like",
        # torch.compile asks these.
        "_is_view",
        "_is_zerotensor",
        "is_conj",
        "is_inference",
        "is_neg",
    }
)
"""Functions of a tensor that do not read its values."""
VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Properties that do."""
SETTABLE = frozenset({"grad", "requires_grad"})
ZEROING = frozenset({"zero_", "_foreach_zero_"})

without_placeholders = torch._C.DisableTorchFunctionSubclass
"""A context in which placeholders answer as plain tensors do: for our own questions,
such as what is in p.grad."""


def _attribute(function: Callable[..., Any]) -> str:
    """Return the name of the property that a getter or setter belongs to."""
    return getattr(getattr(function, "__self__", None), "__name__", "")


def _reads(function: Callable[..., Any]) -> bool:
    if function.__name__ == "__get__":
        return _attribute(function) in VALUES
    if function.__name__ == "__set__":
        return _attribute(function) not in SETTABLE
    return function.__name__ not in TELLING


def _first_of(kind: type, values: Any) -> Any:
    """Return the first tensor of a class among arguments, which may be lists of
    tensors."""
    for value in values:
        if isinstance(value, kind):
            return value
        if isinstance(value, list | tuple):
            found = _first_of(kind, value)
            if found is not None:
                return found
    return None


def _title(function: Callable[..., Any]) -> str:
    if function.__name__ in ("__get__", "__set__"):
        return f".{_attribute(function)}"
    return function.__name__


# ------------------------------------------------------------------------ gradients


class _Reduced:
    __slots__ = ()
    of_param: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what needs no values.

        Raises:
            RuntimeError: names the parameter, and where its gradient can be read or
                clipped.
        """
        if func.__name__ not in ZEROING and _reads(func):
            gradient = _first_of(cls, (*args, *(kwargs or {}).values()))
            raise RuntimeError(
                f"{_title(func)} cannot read the gradient of {gradient.of_param!r}:"
                " it is averaged over the ranks, each holds a part of it. Instead of"
                " torch's clip_grad_norm_ or clip_grad_value_ call the optimizer's:"
                " optimizer.clip_grad_norm_(max_norm); to read it call"
                " optimizer.full_grad(p), or optimizer.local_grad(p), on all ranks"
            )
        with without_placeholders():
            return func(*args, **(kwargs or {}))


class ReducedGradient(_Reduced, Tensor):
    """The p.grad of a gradient that was averaged over the ranks: the parameter's shape,
    no memory of its own.

    Zeroing it drops the gradient, which is noticed by its version counter. Reading it
    is an error that names the remedy.
    """

    @classmethod
    def of(
        cls,
        param: Tensor,
        name: str,
        dtype: torch.dtype,
    ) -> ReducedGradient:
        """Return one for a parameter, of the dtype of its gradient. Each has storage of
        its own, since views share a version counter."""
        value = torch.full((), math.nan, dtype=dtype, device=param.device)
        gradient: Any = value.expand(param.shape)
        gradient.__class__ = _ReducedFake if is_fake(gradient) else cls
        gradient.of_param = name
        return gradient  # type: ignore[no-any-return]


class _ReducedFake(_Reduced, FakeTensor):
    pass


# ------------------------------------------------------------------------ parameters


class Holder(Protocol):
    """Whoever has the values of parameters that are placeholders."""

    def provide(self, param: nn.Parameter, reader: str) -> None:
        """Restore a parameter that `reader`, a function of torch, wants to read.

        Raises:
            RuntimeError: it cannot be read now; names the remedy.
        """


class _Placeholder:
    __slots__ = ()
    _placeholders: weakref.ref[Placeholders]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what needs no values; else have them restored, or refused."""
        if not _reads(func):
            with without_placeholders():
                return func(*args, **(kwargs or {}))
        if func in PASSES and _first_of(cls, args[:1]) is None:
            return run_pass(func, args, kwargs or {}, _Placeholder)
        everything = (*args, *(kwargs or {}).values())
        while (param := _first_of(cls, everything)) is not None:
            _provide(param, _title(func))
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy as any parameter, once it is there."""
        _provide(self, "deepcopy")
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as any parameter, once it is there."""
        _provide(self, "pickle")
        return self.__reduce_ex__(protocol)


class PlaceholderParameter(_Placeholder, nn.Parameter):
    """A parameter whose values are elsewhere. Whoever reads it is handed to a
    `Holder`."""


class _PlaceholderFake(_Placeholder, FakeTensor):
    pass


PLACEHOLDER: dict[type, type] = {
    nn.Parameter: PlaceholderParameter,
    FakeTensor: _PlaceholderFake,
}
"""The class of a parameter, or of a fake one, while its values are elsewhere."""
PRESENT = {placeholder: present for present, placeholder in PLACEHOLDER.items()}


def _placeholder_of(kind: type) -> type:
    """Make the class that stands for a user's class of parameters."""
    made = type(f"Placeholder{kind.__name__}", (_Placeholder, kind), {})
    PLACEHOLDER[kind] = made
    PRESENT[made] = kind
    return made


def _provide(param: Any, reader: str) -> None:
    placeholders = param._placeholders()
    holder = None if placeholders is None else placeholders.holder()
    if holder is None:
        raise RuntimeError(
            f"{reader} cannot read a parameter of shape {tuple(param.shape)}: it is"
            " sharded, and the optimizer that held its shards is gone. Enter"
            " optimizer.full_params() and copy the weights before you drop the"
            " optimizer"
        )
    holder.provide(param, reader)


class Placeholders:
    """Some parameters, which become placeholders and parameters again together."""

    def __init__(self, params: Sequence[nn.Parameter], holder: Holder) -> None:
        """Prepare.

        Args:
            params: which ones.
            holder: is asked when one of them is read. Held weakly.
        """
        self._params = list(params)
        self.holder = weakref.ref(holder)
        self._itself = weakref.ref(self)
        self._nothing = [_nothing(param) for param in params]
        self._addresses = [address(nothing) for nothing in self._nothing]

    def substitute(self) -> None:
        """Let go of the parameters' memory: they keep their shapes, and read as NaN
        where torch is not asked."""
        for param, nothing in zip(self._params, self._nothing, strict=True):
            kind = type(param)
            if kind not in PRESENT:
                param.data = nothing
                if isinstance(param, nn.Parameter) or kind in PLACEHOLDER:
                    param.__class__ = PLACEHOLDER.get(kind) or _placeholder_of(kind)
                    param._placeholders = self._itself  # type: ignore[attr-defined]

    def restore(self, values: Sequence[Tensor]) -> None:
        """Give the parameters their values.

        Args:
            values: one for each.
        """
        for param, value in zip(self._params, values, strict=True):
            kind = type(param)
            if kind in PRESENT:
                param.__class__ = PRESENT[kind]
                del param._placeholders  # type: ignore[attr-defined]
            param.data = value

    def find_replaced(self) -> int | None:
        """Return the index of a parameter that no longer has what `substitute` left in
        it, or None."""
        with without_placeholders():
            for index, param in enumerate(self._params):
                if isinstance(param, FakeTensor):
                    found = address(param)
                else:
                    found = param.data_ptr(), 0
                if found != self._addresses[index]:
                    return index
        return None


def _nothing(param: nn.Parameter) -> Tensor:
    value = math.nan if param.is_floating_point() else 0
    nothing = torch.full((), value, dtype=param.dtype, device=param.device)
    return nothing.expand(param.shape)
