"""Tensors whose values are elsewhere: they tell their shape, and say what to do when
somebody reads them.

Two kinds. A gradient that was reduced leaves a `ReducedGradient` in p.grad. A parameter
changes its class while it is sharded (stage 3) or under way (stages 1 and 2), as
torch's own uninitialised parameters do: the object stays the same, so param groups,
ties and whoever else refers to it never notice, and torch calls `__torch_function__`
for whatever reads it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..pretend import address, is_fake

TELLING = frozenset(
    {
        *(
            "__get__",
            "__hash__",
            "__len__",
            "__repr__",
            "__str__",
            "data_ptr",
            "detach_",
            "dim",
            "element_size",
        ),
        *(
            "get_device",
            "has_names",
            "is_complex",
            "is_contiguous",
            "is_floating_point",
            "is_shared",
            "is_signed",
        ),
        *(
            "nelement",
            "ndimension",
            "numel",
            "register_hook",
            "register_post_accumulate_grad_hook",
            "requires_grad_",
        ),
        # Torch.compile asks.
        *(
            "_is_view",
            "_is_zerotensor",
            "is_conj",
            "is_inference",
            "is_neg",
        ),
        *("retain_grad", "size", "storage_offset", "stride", "type", "untyped_storage"),
        *(
            "empty_like",
            "full_like",
            "ones_like",
            "rand_like",
            "randint_like",
            "randn_like",
            "zeros_like",
        ),
        *("new_empty", "new_full", "new_ones", "new_zeros"),
    }
)
"""Functions of a tensor that do not read its values."""
VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Properties that do."""
SETTABLE = frozenset({"grad", "requires_grad"})
ZEROING = frozenset({"zero_", "_foreach_zero_"})


def _reads(function: Callable[..., Any]) -> bool:
    name = function.__name__
    attribute = getattr(getattr(function, "__self__", None), "__name__", "")
    if name == "__get__":
        return attribute in VALUES
    if name == "__set__":
        return attribute not in SETTABLE
    return name not in TELLING


def _absent_among(values: Any, kind: type) -> Any:
    """Return the first tensor of a class among arguments, which may be lists of
    tensors."""
    for value in values:
        if isinstance(value, kind):
            return value
        if (
            isinstance(value, list | tuple)
            and (found := _absent_among(value, kind)) is not None
        ):
            return found
    return None


def _name_of(function: Callable[..., Any]) -> str:
    attribute = getattr(getattr(function, "__self__", None), "__name__", "")
    return (
        f".{attribute}"
        if function.__name__ in ("__get__", "__set__")
        else function.__name__
    )


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
            gradient = _absent_among((*args, *(kwargs or {}).values()), cls)
            raise RuntimeError(
                f"{_name_of(func)} cannot read the gradient of {gradient.of_param!r}:"
                " it is averaged over the ranks, each holds a part of it. Instead of"
                " torch's clip_grad_norm_ call optimizer.clip_grad_norm_(max_norm); to"
                " read it call optimizer.full_grad(p), or optimizer.local_grad(p), on"
                " all ranks"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class ReducedGradient(_Reduced, Tensor):
    """What p.grad is once it was averaged over the ranks: the parameter's shape, no
    memory of its own.

    Zeroing it drops the gradient, which is noticed by its version counter. Reading it
    is an error that names the remedy.
    """

    @classmethod
    def of(cls, param: Tensor, name: str) -> ReducedGradient:
        """Return one for a parameter. Each has storage of its own, since views share a
        version counter."""
        value = torch.full((), math.nan, dtype=param.dtype, device=param.device)
        gradient: Any = value.expand(param.shape)
        gradient.__class__ = _ReducedFake if is_fake(gradient) else cls
        gradient.of_param = name
        return gradient  # type: ignore[no-any-return]


class _ReducedFake(_Reduced, FakeTensor):
    pass


class _Absent:
    __slots__ = ()
    _absence: weakref.ref[Absence]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what needs no values; else have them brought, or refused."""
        if _reads(func):
            while (
                param := _absent_among((*args, *(kwargs or {}).values()), cls)
            ) is not None:
                _bring(param, _name_of(func))
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy as any parameter, once it is there."""
        _bring(self, "deepcopy")
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as any parameter, once it is there."""
        _bring(self, "pickle")
        return self.__reduce_ex__(protocol)


class AbsentParameter(_Absent, nn.Parameter):
    """A parameter that is not here. Whoever reads it is handed to `Absence.read`."""


class _AbsentFake(_Absent, FakeTensor):
    pass


ABSENT: Mapping[type, type] = {nn.Parameter: AbsentParameter, FakeTensor: _AbsentFake}
"""What the class of a parameter, or of a fake one, is while it is not here."""
PRESENT = {absent: present for present, absent in ABSENT.items()}


def _bring(param: Any, reader: str) -> None:
    absence = param._absence()
    if absence is None:
        raise RuntimeError(
            f"{reader} cannot read a parameter of shape {tuple(param.shape)}: it is"
            " sharded, and the optimizer that held its shards is gone. Enter"
            " optimizer.full_params() and copy the weights before you drop the"
            " optimizer"
        )
    absence.read(param, reader)


class Absence:
    """Some parameters, and what happens to whoever reads them while they are not
    here."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        on_read: Callable[[nn.Parameter, str], None],
    ) -> None:
        """Prepare.

        Args:
            params: which ones.
            on_read: gets the parameter and the name of what wants to read it. Must make
                it present, or raise.
        """
        self.params = list(params)
        self.read = on_read
        self._nothing = [_nothing(param) for param in self.params]

    def begin(self) -> None:
        """Let go of the parameters' memory: they keep their shapes and read as NaN
        where torch is not asked."""
        for param, nothing in zip(self.params, self._nothing, strict=True):
            if type(param) in PRESENT:
                continue
            param.data = nothing
            if type(param) in ABSENT:
                param.__class__ = ABSENT[type(param)]
                param._absence = weakref.ref(self)  # type: ignore[attr-defined]

    def end(self, values: Sequence[Tensor]) -> None:
        """Give the parameters their values.

        Args:
            values: one for each.
        """
        for param, value in zip(self.params, values, strict=True):
            if type(param) in PRESENT:
                param.__class__ = PRESENT[type(param)]
                del param._absence  # type: ignore[attr-defined]
            param.data = value

    def holds(self, index: int) -> bool:
        """Return whether a parameter still has what `begin` left in it."""
        with torch._C.DisableTorchFunctionSubclass():
            return address(self.params[index]) == address(self._nothing[index])


def _nothing(param: nn.Parameter) -> Tensor:
    value = math.nan if param.is_floating_point() else 0
    return torch.full((), value, dtype=param.dtype, device=param.device).expand(
        param.shape
    )
