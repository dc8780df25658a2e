"""From checked parameters and options to a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import checks, layout, ops
from .comm import Comm
from .config import Buckets, Precision
from .rules import UpdateRule
from .stages.initial import Initial
from .stages.units import ROOT, unit_modules, unit_of_params
from .stages.zero1 import Place, Zero1
from .stages.zero2 import Zero2
from .stages.zero3 import Zero3


@dataclass(frozen=True)
class Plan:
    """A layout that all ranks agreed on, and what will run it."""

    params: list[nn.Parameter]
    coordinator: Callable[[], Zero1]


def plan(
    groups: Sequence[Mapping[str, Any]],
    stage: int,
    model: nn.Module | None,
    comm: Comm,
    rule: UpdateRule,
    precision: Precision,
    buckets: Buckets,
    init: Any,
) -> Plan:
    """Lay out the parameters and have all ranks agree on it.

    Raises:
        ValueError: on all ranks, if their layouts, rules or precisions differ.
    """
    checks.check_precision(groups, rule, precision)
    example = next(param for group in groups for param in group["params"])
    if not example.is_meta:
        ops.check_backend(example)
    params, names, place_of = _places(groups)
    sharded = stage == 3 and comm.world > 1
    units: dict[int, str] = {}
    if model is not None:
        names.update((id(p), name) for name, p in model.named_parameters())
    if sharded:
        assert model is not None
        params = _in_model_order(params, model)
        units = unit_of_params(model, buckets.units)
    specs = [_spec(p, names[id(p)], units) for p in params]
    chosen = (
        layout.by_unit(specs, comm.world)
        if sharded
        else layout.bucketed(specs, comm.world, buckets.bytes)
    )
    lines = _description(chosen, rule, precision, [place_of.get(id(p)) for p in params])
    if comm.world > 1:
        checks.check_unwrapped(params)
    initial = _initial(params, model, init, comm)
    device = params[0].device if initial is None else initial.device
    comm.check_agreement(layout.fingerprint(lines), lines, device)
    places = [place_of.get(id(p), Place(-1, -1)) for p in params]

    def coordinator() -> Zero1:
        agreed = chosen, params, places, comm, rule, precision, buckets
        if sharded:
            assert model is not None
            return Zero3(*agreed, device=device, initial=initial, model=model)
        if initial is not None:
            initial.make(list(initial.model.parameters()))
        zero = (Zero1 if stage == 1 else Zero2)(*agreed, device=device)
        if model is not None and buckets.gather_in_forward:
            units = unit_modules(model, buckets.units)
            zero.arriving.hook([m for name, m in units.items() if name != ROOT])
        return zero

    return Plan(params, coordinator)


def _description(
    chosen: layout.Layout,
    rule: UpdateRule,
    precision: Precision,
    places: Sequence[Place | None],
) -> list[str]:
    """Return what all ranks must agree on, a line each."""
    return [
        *chosen.lines(),
        f"update rule {rule.kernel} with {list(rule.moments)}, {precision}",
        *(
            f"group of {spec.name!r}: {place}"
            for spec, place in zip(chosen.params, places, strict=True)
        ),
    ]


def _spec(param: Tensor, name: str, units: Mapping[int, str]) -> layout.ParamSpec:
    dtype = str(param.dtype).removeprefix("torch.")
    return layout.ParamSpec(
        name,
        tuple(param.shape),
        dtype,
        param.element_size(),
        param.requires_grad,
        units.get(id(param), ""),
    )


def _places(
    groups: Sequence[Mapping[str, Any]],
) -> tuple[list[nn.Parameter], dict[int, str], dict[int, Place]]:
    """Return the parameters in order, and their names and places by id."""
    names: dict[int, str] = {}
    place_of: dict[int, Place] = {}
    params: list[nn.Parameter] = []
    for index, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            given = group.get("param_names")
            names[id(param)] = given[position] if given else f"{index}.{position}"
            place_of[id(param)] = Place(index, len(params))
            params.append(param)
    return params, names, place_of


def _initial(
    params: Sequence[nn.Parameter], model: nn.Module | None, init: Any, comm: Comm
) -> Initial | None:
    """Return what makes parameters that are on the meta device; None if none is."""
    if not any(param.is_meta for param in params):
        if init is not None:
            raise ValueError(
                "init= is for parameters on the meta device, and there are none;"
                " initialise the model yourself"
            )
        return None
    if model is None:
        raise ValueError(
            "parameters are on the meta device; pass model=model, whose modules"
            " initialise them"
        )
    device = torch.get_default_device()
    if comm.native_gather:
        device = torch.device("cuda", torch.cuda.current_device())
    return Initial(
        model, init, torch.device("cpu") if device.type == "meta" else device
    )


def _in_model_order(
    params: Sequence[nn.Parameter], model: nn.Module
) -> list[nn.Parameter]:
    """Return what stage 3 shards, in order of registration: the optimizer's parameters,
    and frozen ones."""
    ours = {id(p) for p in params}
    chosen = [p for p in model.parameters() if id(p) in ours or not p.requires_grad]
    for name, param in model.named_parameters():
        checks.check_param(name, param)
    missing = ours - {id(p) for p in chosen}
    if missing:
        raise ValueError(
            f"{len(missing)} parameters of the optimizer are not in model; pass the"
            " module that holds all of them"
        )
    return chosen
