"""Checks of a user's model: of the modules that hold the optimizer's parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .holders import is_held


def check_unwrapped(params: Sequence[Tensor]) -> None:
    """Refuse parameters of a model that DistributedDataParallel averages, too.

    Raises:
        ValueError: names the wrapper.
    """
    if is_held(params, DistributedDataParallel):
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
    if is_held(params, torch.jit.ScriptModule):
        raise ValueError(
            "a part of the model is TorchScript, which would not wait for parameters"
            " that are still being gathered; leave Buckets(gather_in_forward=True) out,"
            " or pass the module that was scripted or traced"
        )


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
