"""Checks of users' arguments, before anything is changed; errors say value, rule and
remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import ops
from .config import Buckets, Precision
from .pretend import address
from .rules import UpdateRule, is_nonzero


def check_options(
    stage: int,
    model: nn.Module | None,
    process_group: ProcessGroup | None,
    mesh: DeviceMesh | None,
    max_grad_norm: float | None,
    buckets: Buckets,
) -> None:
    """Refuse options that contradict each other.

    Raises:
        ValueError: says the value, the rule and the remedy.
        TypeError: model is not a module.
    """
    if stage not in (1, 2, 3):
        raise ValueError(
            f"stage={stage!r}: it must be 1 (optimizer state), 2 (and gradients) or 3"
            " (and parameters)"
        )
    if stage == 3 and model is None:
        raise ValueError(
            "stage=3 needs the module, to gather its units before their forward: pass"
            " model=model"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: it must be a torch.nn.Module")
    if process_group is not None and mesh is not None:
        raise ValueError("process_group and mesh are both given; pass one of them")
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions; pass the one to shard over, for example"
            " mesh['dp']"
        )
    if buckets.update_in_backward and max_grad_norm is not None:
        raise ValueError(
            "max_grad_norm needs all gradients before the first update, and"
            " Buckets(update_in_backward=True) makes updates during backward; leave one"
            " of them out"
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(
            f"max_grad_norm={max_grad_norm}: it must be positive, or None for no"
            " clipping"
        )


def checked_groups(params: Iterable[Any]) -> list[Any]:
    """Return `params` as a list, after refusing duplicates and what cannot be sharded.

    Raises:
        ValueError: no parameter, a parameter given twice, several devices, sparse or
            aliased memory, a DTensor.
        TypeError: not a parameter, or of a dtype that the kernels do not know.
    """
    given = [params] if isinstance(params, Mapping) else params
    if isinstance(given, Tensor):
        raise TypeError(
            "params is a single tensor; pass a list of parameters, for example"
            " model.parameters()"
        )
    groups = [
        dict(g, params=_listed(g["params"])) if isinstance(g, Mapping) else g
        for g in given
    ]
    if not groups:
        raise ValueError("the parameter list is empty; pass model.parameters()")
    seen: dict[int, str] = {}
    memory: dict[tuple[int, int], str] = {}
    devices: dict[torch.device, str] = {}
    for index, item in enumerate(groups):
        for position, entry in enumerate(
            item["params"] if isinstance(item, Mapping) else [item]
        ):
            name, param = (
                entry
                if isinstance(entry, tuple)
                else (f"parameter {position} of group {index}", entry)
            )
            if not isinstance(param, Tensor):
                raise TypeError(
                    f"{name} is a {type(param).__name__}; it must be a"
                    " torch.nn.Parameter"
                )
            if id(param) in seen:
                raise ValueError(
                    f"{name} is also {seen[id(param)]}; give every parameter once"
                )
            seen[id(param)] = name
            check_param(name, param)
            devices.setdefault(param.device, name)
            if (
                param.numel()
                and not param.is_meta
                and memory.setdefault(address(param), name) != name
            ):
                raise ValueError(
                    f"{name} shares memory with {memory[address(param)]}; "
                    "tie them by using one Parameter object in both places"
                )
    if not seen:
        raise ValueError("every parameter group is empty; pass model.parameters()")
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(
            f"parameters are on several devices ({places}); move the model to one"
            " device per rank"
        )
    return groups


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def check_param(name: str, param: Tensor) -> None:
    """Refuse a tensor that cannot be sharded.

    Raises:
        ValueError: a DTensor, a sparse layout, a tensor with a graph.
        TypeError: it is trained in a dtype that the kernels do not know.
    """
    if hasattr(param, "placements"):
        raise ValueError(
            f"{name} is a DTensor, sharded already; pass plain parameters, without"
            " FSDP2 or tensor parallelism"
        )
    if is_traceable_wrapper_subclass(param) and param.requires_grad:
        raise ValueError(
            f"{name} is a {type(param.data).__name__}, a tensor subclass that holds"
            " other tensors; zerokern trains plain tensors only: freeze it"
            " (requires_grad=False), and train adapters beside it"
        )
    if param.layout != torch.strided:
        raise ValueError(
            f"{name} has layout {param.layout}; zerokern shards dense parameters only"
        )
    if param.requires_grad and param.dtype not in ops.FLOATS:
        raise TypeError(
            f"{name} is {param.dtype}; trainable parameters must be float32, bfloat16"
            " or float16"
        )
    if param.requires_grad and not param.is_leaf:
        raise ValueError(
            f"{name} is not a leaf of the autograd graph; pass the parameter itself,"
            " not a function of it"
        )


def check_hyper(group: Mapping[str, Any]) -> None:
    """Refuse hyper-parameters that torch refuses, and options that are not available.

    Raises:
        ValueError: says the value and the rule.
    """
    if group.get("differentiable"):
        raise ValueError(
            "differentiable=True is not available in zerokern; leave it False"
        )
    for name in ("lr", "eps", "weight_decay", "momentum"):
        value = group.get(name, 0.0)
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"{name} is a tensor of shape {tuple(value.shape)}; it must hold"
                    " one number"
                )
        elif not value >= 0:
            raise ValueError(f"{name}={value}: it must not be negative or NaN")
    dampening = group.get("dampening", 0.0)
    if group.get("nesterov") and (dampening != 0 or not is_nonzero(group["momentum"])):
        raise ValueError(
            f"nesterov=True with momentum={group['momentum']} and"
            f" dampening={dampening}: it needs a momentum and zero dampening"
        )
    for index, beta in enumerate(group.get("betas", ())):
        if not isinstance(beta, Tensor) and not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{index}]={beta}: it must be in [0, 1)")


def check_precision(
    groups: Sequence[Mapping[str, Any]], rule: UpdateRule, precision: Precision
) -> None:
    """Refuse formats that cannot hold what the rule or the parameters need.

    Raises:
        ValueError: names the option, what it cannot hold and what can.
    """
    if "max_exp_avg_sq" in rule.moments and precision.moments == "8bit":
        raise ValueError(
            "amsgrad=True is not available with Precision(moments='8bit'): a running"
            " maximum does not last in blocks whose scale moves; use moments='bf16' or"
            " 'fp32', or amsgrad=False"
        )
    if precision.master == "fp32":
        return
    for param in (p for group in groups for p in group["params"]):
        if param.requires_grad and param.dtype == torch.float16:
            raise ValueError(
                f"Precision(master={precision.master!r}) needs bfloat16 (or float32)"
                f" parameters, and one of shape {tuple(param.shape)} is float16; use"
                " master='fp32', or cast the model to bfloat16"
            )


def check_norm_type(norm_type: float) -> None:
    """Refuse a norm that is not available.

    Raises:
        ValueError: its order is not positive.
    """
    if not norm_type > 0:
        raise ValueError(
            f"norm_type={norm_type}: it must be positive, such as 2.0 or infinity"
        )


def check_bound(name: str, bound: float | Tensor) -> None:
    """Refuse a bound on gradients that none can keep.

    Raises:
        ValueError: it is negative or NaN.
    """
    if not isinstance(bound, Tensor) and not bound >= 0:
        raise ValueError(f"{name}={bound}: it must not be negative or NaN")


def check_finite(norm: Tensor, norm_type: float) -> None:
    """Refuse a total norm that is not finite, in torch's words. The host waits for it.

    Raises:
        RuntimeError: on all ranks, since it is the same there.
    """
    if not bool(norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is"
            " non-finite, so it cannot be clipped. To disable this error and scale the"
            " gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )


def check_loss(loss: Any) -> None:
    """Refuse what a closure has returned, unless it is a loss.

    Raises:
        TypeError: it is neither a tensor nor a number.
    """
    if not isinstance(loss, Tensor | float | int):
        raise TypeError(
            f"the closure returned {type(loss).__name__}; it must return the loss, a"
            " tensor or a number. Nothing was updated"
        )


def check_edited(params: Sequence[Tensor], rule: UpdateRule, known: UpdateRule) -> None:
    """Refuse param groups that were edited into what no optimizer is built from.

    Raises:
        ValueError: a parameter is in them twice, or they need other states.
    """
    if len(set(map(id, params))) < len(params):
        raise ValueError(
            "a parameter is in the param groups twice, after these were edited; take it"
            " out of one. Nothing was updated"
        )
    if rule != known:
        raise ValueError(
            f"the param groups need the states {sorted(rule.moments)} since they were"
            f" edited, and the optimizer was built with {sorted(known.moments)}; build"
            " a new one. Nothing was updated"
        )


def check_added(name: str, param: Tensor, device: torch.device) -> None:
    """Refuse a parameter that cannot be added to an optimizer that is built.

    Raises:
        ValueError: it is on another device.
    """
    if param.device != device:
        raise ValueError(
            f"{name} is on {param.device}, the optimizer's other parameters on"
            f" {device}; move it there before it is added. Nothing was updated"
        )


def refuse_copy(*_: Any) -> None:
    """Refuse to copy or pickle an optimizer, whose method this is.

    Raises:
        TypeError: always; says the remedy.
    """
    raise TypeError(
        "a zerokern optimizer cannot be copied or pickled: it holds hooks, transfers"
        " and one rank's shards. Copy or save the model inside optimizer.full_params()"
        " and optimizer.full_state_dict(), build a new optimizer on the copy and load"
        " the state there"
    )


def refuse_scaler() -> None:
    """Refuse torch's own GradScaler on several ranks.

    Raises:
        RuntimeError: always; says the remedy.
    """
    raise RuntimeError(
        "torch.amp.GradScaler looks at p.grad, where sharded gradients are not; use"
        " zerokern.GradScaler, a subclass of it with the same arguments"
    )
