"""Initial values: made where a model was built on the meta device, and the same on all
ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..transport import Transport
from .parameters import ParameterBucket

COLUMNS = 64
"""Of the table that a checksum makes of a tensor's words."""


class Initial:
    """Gives parameters on the meta device memory and values, some at a time, so that no
    rank ever holds all of them."""

    def __init__(
        self,
        model: nn.Module,
        init: Callable[[nn.Module], Any] | Any | None,
        device: torch.device,
    ) -> None:
        """Look at the model.

        Args:
            model: whose parameters and buffers to make.
            init: gives the parameters and buffers that a module itself owns their
                values; or a mapping from names to tensors, or what has
                `get_tensor(name)` as safetensors' files do; None:
                `module.reset_parameters()`.
            device: where to make them.

        Raises:
            ValueError: a module cannot initialise itself, or the mapping lacks a
                tensor. Nothing was made.
        """
        self.model = model
        self.init = init
        self.device = device
        self._made: set[int] = set()
        self._initialised: set[int] = set()
        self._visited: set[str] = set()
        """Modules all of whose parameters were made."""
        self._names: set[str] = set()
        """The values of a mapping."""
        if init is None:
            self._check_modules()
        elif not callable(init):
            self._check_names(init)

    def _check_modules(self) -> None:
        for name, module in self.model.named_modules():
            owns = next(
                module.parameters(recurse=False), None
            ) is not None or _meta_buffers(module)
            if owns and not hasattr(module, "reset_parameters"):
                raise ValueError(
                    f"module {name!r} ({type(module).__name__}) is on the meta device"
                    " and has no reset_parameters(); pass init=, a function that gives"
                    " a module's own parameters and buffers their values"
                )

    def _check_names(self, source: Any) -> None:
        there = self._names = set(source.keys())
        tied = {
            id(p): name
            for name, p in self.model.named_parameters(remove_duplicate=False)
            if name in there
        }
        missing = [
            name
            for name, tensor in self.model.state_dict(keep_vars=True).items()
            if name not in there and id(tensor) not in tied
        ]
        for name, module in self.model.named_modules():
            lost = [
                key
                for key in _meta_buffers(module)
                if key in module._non_persistent_buffers_set
            ]
            if lost:
                raise ValueError(
                    f"buffer {name}.{lost[0]} is not persistent, so no checkpoint has"
                    " it, and is on the meta device: make that module on the device,"
                    " or pass a function as init="
                )
        if missing:
            raise ValueError(
                f"init has no tensor {missing[0]!r}, which the model needs"
                f" ({len(missing)} are missing)"
            )

    @torch.no_grad()
    def make(self, params: Sequence[nn.Parameter]) -> None:
        """Make some parameters, and the buffers of the modules that they complete.

        Raises:
            ValueError: a tensor of the mapping has another shape.
        """
        fresh = [param for param in params if param.is_meta]
        for param in fresh:
            memory = torch.empty_like(param, device=self.device)
            swap_tensors(param, nn.Parameter(memory, requires_grad=param.requires_grad))
            self._made.add(id(param))
        # Children first, as libraries do it: a container may change what its children
        # have made.
        for name, module in _children_first(self.model):
            if name not in self._visited and all(
                id(p) in self._made or not p.is_meta for p in module.parameters()
            ):
                self._visited.add(name)
                self._initialise(name, module)

    def _initialise(self, name: str, module: nn.Module) -> None:
        for key, buffer in _meta_buffers(module).items():
            module._buffers[key] = torch.empty_like(buffer, device=self.device)
        params = dict(module.named_parameters(recurse=False))
        if params and all(id(param) in self._initialised for param in params.values()):
            return  # tied: another module has done it
        if self.init is None:
            if params or _owns_buffers(module):
                module.reset_parameters()  # type: ignore[operator]
        elif callable(self.init):
            self.init(module)
        else:
            for key, tensor in [*params.items(), *module.named_buffers(recurse=False)]:
                if key not in module._non_persistent_buffers_set:
                    tensor.copy_(self._fetch(tensor, f"{name}.{key}" if name else key))
        self._initialised |= {id(param) for param in params.values()}

    def _fetch(self, like: Tensor, name: str) -> Tensor:
        source: Any = self.init
        if name not in self._names:  # tied: under another name
            named = self.model.named_parameters(remove_duplicate=False)
            name = next(
                other
                for other, param in named
                if param is like and other in self._names
            )
        value: Tensor = (
            source.get_tensor(name) if hasattr(source, "get_tensor") else source[name]
        )
        if value.shape != like.shape:
            raise ValueError(
                f"init has {name!r} of shape {tuple(value.shape)}; the model needs"
                f" {tuple(like.shape)}"
            )
        return value


def _children_first(
    module: nn.Module, name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        yield from _children_first(child, f"{name}.{key}" if name else key)
    yield name, module


def _owns_buffers(module: nn.Module) -> bool:
    return next(module.buffers(recurse=False), None) is not None


def _meta_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {
        key: buffer
        for key, buffer in module.named_buffers(recurse=False)
        if buffer.is_meta
    }


def make_equal(
    members: Mapping[str, Sequence[nn.Parameter]], transport: Transport
) -> None:
    """Give every rank the initial values of rank 0, as DDP does; what is equal already
    is not sent.

    Args:
        members: parameters by bucket, under a name for the log.
        transport: between the ranks.
    """
    if transport.groups.alone or not members:
        return
    with torch.no_grad():
        sums = torch.stack([checksum(p) for chosen in members.values() for p in chosen])
        gathered = transport.all_gather_words(sums)
        if transport.groups.agrees.is_fake:
            return
        for rank, theirs in enumerate(gathered):
            if not torch.equal(theirs, gathered[0]) and torch.equal(
                theirs.sort().values, gathered[0].sort().values
            ):
                index = int((theirs != gathered[0]).nonzero()[0])
                raise ValueError(
                    f"Rank {rank} has the parameters of rank 0 in another order, from"
                    f" parameter {index} of the layout on: pass them in one order on"
                    " all ranks, not from a set"
                )
        starts = [0]
        for chosen in members.values():
            starts.append(starts[-1] + len(chosen))
        for (name, chosen), start in zip(members.items(), starts, strict=False):
            of_ranks = gathered[:, start : start + len(chosen)]
            if (of_ranks != of_ranks[0]).any():
                for param in chosen:
                    value = param.detach().contiguous()
                    transport.broadcast(value, name)
                    param.copy_(value)


def make_buffers_equal(model: nn.Module, transport: Transport) -> None:
    """Give every rank the buffers of rank 0, as DDP does at construction; what is equal
    already is not sent."""
    named = [(name, b) for name, b in model.named_buffers() if _is_plain(b)]
    if transport.groups.alone or not named:
        return
    with torch.no_grad():
        sums = torch.stack([checksum(b).to(transport.device) for _, b in named])
        gathered = transport.all_gather_words(sums)
        if transport.groups.agrees.is_fake:
            return
        for index, (name, buffer) in enumerate(named):
            if (gathered[:, index] != gathered[0, index]).any():
                value = _resolved(buffer).to(transport.device, copy=True)
                # As bytes: back ends do not know every dtype.
                transport.broadcast(value.view(-1).view(torch.uint8), name)
                _overwrite(name, buffer, value)


def _overwrite(name: str, buffer: Tensor, value: Tensor) -> None:
    try:
        buffer.copy_(value)
    except RuntimeError as error:
        raise ValueError(
            f"buffer {name!r} differs between the ranks and cannot be given the values"
            f" of rank 0 ({error}); make it equal on all ranks, or clone it, before the"
            " optimizer is built"
        ) from error


def _is_plain(buffer: Tensor) -> bool:
    is_wrapper = is_traceable_wrapper_subclass(buffer)
    is_dense = buffer.layout == torch.strided and not buffer.is_meta
    return bool(is_dense and not is_wrapper and buffer.numel())


def checksum(tensor: Tensor) -> Tensor:
    """Return an int64 that tells a tensor's bytes and their order: sums of its words,
    each word weighted by its place."""
    words = _resolved(tensor).view(-1).view(_words_of(tensor))
    size = words.numel() // COLUMNS * COLUMNS
    table, tail = words[:size].view(-1, COLUMNS), words[size:]
    total = _weighted(tail.to(torch.int64), 1)
    total = total + _weighted(table.sum(1, dtype=torch.int64), 3)
    return total + _weighted(table.sum(0, dtype=torch.int64), 5)


def checksum_of(buckets: Iterable[ParameterBucket]) -> Tensor:
    """Return an int64 that tells what the parameters of buckets are, [1], on their
    device; they are whole."""
    weighted = [
        (1 + handle.index) * checksum(handle.param)
        for bucket in buckets
        for handle in bucket.handles
    ]
    return torch.stack(weighted).sum().view(1)


def _resolved(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory is its values, row by row."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _words_of(tensor: Tensor) -> torch.dtype:
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return sizes.get(tensor.element_size(), torch.int64)


def _weighted(words: Tensor, first: int) -> Tensor:
    places = torch.arange(words.numel(), device=words.device)
    return (words * (2 * places + first)).sum()
