"""Checks of a user's model: of the modules that hold the optimizer's parameters."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def check_unwrapped(params: Sequence[Tensor]) -> None:
    """Refuse parameters of a model that DistributedDataParallel averages, too.

    Raises:
        ValueError: names the wrapper.
    """
    if _is_held(params, DistributedDataParallel):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which averages the"
            " gradients that zerokern averages; leave the wrapper out and call the"
            " module itself (ddp.module)"
        )


def check_readable(params: Sequence[Tensor]) -> None:
    """Refuse parameters of TorchScript, which reads them without anybody noticing.

    Raises:
        ValueError: says the remedy.
    """
    if _is_held(params, torch.jit.ScriptModule):
        raise ValueError(
            "a part of the model is TorchScript, which would not wait for parameters"
            " that are still being gathered; leave Buckets(gather_in_forward=True) out,"
            " or pass the module that was scripted or traced"
        )


def _is_held(params: Sequence[Tensor], kind: type[nn.Module]) -> bool:
    """Return whether a module of a kind has any of the parameters."""
    if not _holds(params, kind):
        return False
    gc.collect()  # one that nobody holds any more does no harm
    return _holds(params, kind)


def _holds(params: Sequence[Tensor], kind: type[nn.Module]) -> bool:
    # Parameters do not know their modules; the collector knows all instances.
    ours = set(map(id, params))
    kinds = _with_subclasses(kind)
    modules = [known for known in gc.get_referrers(*kinds) if type(known) in kinds]
    return any(id(param) in ours for module in modules for param in module.parameters())


def _with_subclasses(kind: type[nn.Module]) -> set[type[nn.Module]]:
    kinds = {kind}
    for subclass in kind.__subclasses__():
        kinds |= _with_subclasses(subclass)
    return kinds


def check_hookable(units: Mapping[str, nn.Module]) -> None:
    """Refuse units that are compiled by TorchScript, whose forward runs no hook.

    Raises:
        ValueError: names the module.
    """
    for name, module in units.items():
        # Traced ones run hooks.
        if type(module).__name__ == "RecursiveScriptModule":
            raise ValueError(
                f"module {name or 'model'!r} is scripted (torch.jit.script), and runs"
                " no hook that could gather its parameters (stage 3); pass the module"
                " that was scripted, trace it, or use stage 2"
            )


def check_units(
    added: Sequence[Tensor],
    model: nn.Module,
    units: Mapping[int, str],
    known: Collection[str],
) -> None:
    """Refuse, in stage 3, parameters that no unit gathers.

    Raises:
        ValueError: they are not in the model, or in a module that has come to it since
            and would be a unit of its own.
    """
    ours = set(map(id, model.parameters()))
    for param in added:
        name = units.get(id(param), "")
        if id(param) not in ours or name not in known:
            where = "not in model" if id(param) not in ours else f"of unit {name!r}"
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} was added that is {where},"
                " which no hook gathers (stage 3); build a new optimizer, which takes"
                " the parameters over. Nothing was updated"
            )
