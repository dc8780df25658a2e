"""From checked parameters and options to the blueprint of a coordinator."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import backends, checks, layout, model_checks, owners
from .config import Buckets, Precision
from .groups import Groups
from .rules import UpdateRule
from .saved_groups import names_of
from .sharding.blueprint import Blueprint, Sharding
from .sharding.coordinator import Coordinator
from .sharding.handles import ParamHandles
from .sharding.initial import Initial
from .sharding.units import unit_modules, unit_of_params
from .transport import Transport

NOWHERE = (-1, -1)
"""The place of a frozen parameter that is in no param group."""


def blueprint(
    param_groups: Sequence[Mapping[str, Any]],
    rule: UpdateRule,
    groups: Groups,
    *,
    stage: int,
    model: nn.Module | None,
    precision: Precision,
    buckets: Buckets,
    init: Any,
) -> Blueprint:
    """Lay out the parameters and have all ranks agree on it. Nothing is changed.

    Args:
        param_groups: torch's, checked.
        rule: that of the optimizer.
        groups: the ranks.
        stage, model, precision, buckets, init: the user's options, checked.

    Raises:
        ValueError: on all ranks, if their layouts, rules or precisions differ.
    """
    checks.check_precision(param_groups, rule, precision)
    params, names, places = _listed(param_groups)
    if not params[0].is_meta:
        backends.check_backend(params[0])
    if model is not None:
        names.update((id(p), name) for name, p in model.named_parameters())
    sharding = Sharding.of_stage(stage, groups.shards.size)
    units: dict[int, str] = {}
    if sharding.parameters:
        assert model is not None
        params = _in_model_order(params, model)
        units = unit_of_params(model, buckets.units)
        model_checks.check_hookable(unit_modules(model, buckets.units))
    elif buckets.gather_in_forward and not groups.alone:
        model_checks.check_readable(params)
    specs = [_spec(p, names[id(p)], units) for p in params]
    if sharding.parameters:
        chosen = layout.by_unit(specs, groups.shards.size)
    else:
        chosen = layout.bucketed(specs, groups.shards.size, buckets.bytes)
    if not groups.alone:
        model_checks.check_unwrapped(params)
    initial = _initial(
        params,
        model,
        init,
        groups,
    )
    device = params[0].device if initial is None else initial.device
    transport = Transport(groups, device)
    handles = ParamHandles(chosen, params, [places.get(id(p), NOWHERE) for p in params])
    lines = _description(handles, chosen, rule, precision, model)
    _agree(transport, lines)
    return Blueprint(
        chosen,
        handles,
        transport,
        sharding,
        rule,
        precision,
        buckets,
        model,
        initial,
    )


def follow(
    coordinator: Coordinator,
    param_groups: Sequence[MutableMapping[str, Any]],
    rule: UpdateRule,
) -> None:
    """Have a coordinator follow param groups that were edited since, and parameters in
    them that were added or thawed. All ranks must do so.

    Args:
        coordinator: at rest.
        param_groups: torch's.
        rule: of these groups.

    Raises:
        ValueError: on all ranks, if they differ; or what is new does not fit. Nothing
            was changed.
    """
    blueprint, handles = coordinator.blueprint, coordinator.handles
    params, names, places = _listed(param_groups)
    checks.check_edited(params, rule, blueprint.rule)
    added = [param for param in params if handles.find(param) is None]
    for param in added:
        checks.check_param(names[id(param)], param)
        checks.check_added(names[id(param)], param, blueprint.transport.device)
    added = [param for param in added if not is_traceable_wrapper_subclass(param)]
    units = _units_of_added(added, coordinator, names)

    specs = []
    for handle, spec in zip(handles, coordinator.layout.params, strict=True):
        thawed = handle.param.requires_grad and id(handle.param) in places
        specs.append(replace(spec, trainable=spec.trainable or thawed))
    specs += [_spec(param, names[id(param)], units) for param in added]
    chosen = coordinator.layout
    if tuple(specs) != chosen.params:
        limit = None if blueprint.sharding.parameters else blueprint.buckets.bytes
        chosen = layout.grown(chosen, specs, limit)

    everyone = [*(handle.param for handle in handles), *added]
    places_ = [places.get(id(param), NOWHERE) for param in everyone]
    grown = ParamHandles(chosen, everyone, places_)
    lines = _description(grown, chosen, rule, blueprint.precision, None)
    _agree(blueprint.transport, lines)
    coordinator.follow(chosen, grown, param_groups)


def _units_of_added(
    added: Sequence[nn.Parameter],
    coordinator: Coordinator,
    names: dict[int, str],
) -> dict[int, str]:
    """Return the unit of each parameter, and enter their names; nothing in stages 1 and
    2."""
    blueprint = coordinator.blueprint
    if not (blueprint.sharding.parameters and added):
        return {}
    assert blueprint.model is not None
    names.update((id(p), name) for name, p in blueprint.model.named_parameters())
    units = unit_of_params(blueprint.model, blueprint.buckets.units)
    known = coordinator.parameters.unit_names()
    model_checks.check_units(added, blueprint.model, units, known)
    return units


def _listed(
    param_groups: Sequence[Mapping[str, Any]],
) -> tuple[list[nn.Parameter], dict[int, str], dict[int, tuple[int, int]]]:
    """Return the parameters in order, and by id their names and their places: (group,
    position over all groups)."""
    params: list[nn.Parameter] = []
    names: dict[int, str] = {}
    places: dict[int, tuple[int, int]] = {}
    for index, group in enumerate(param_groups):
        given = names_of(group)
        for position, param in enumerate(group["params"]):
            names[id(param)] = given[position] if given else f"{index}.{position}"
            places[id(param)] = index, len(params)
            params.append(param)
    return params, names, places


def _spec(
    param: Tensor,
    name: str,
    units: Mapping[int, str],
) -> layout.ParamSpec:
    return layout.ParamSpec(
        name,
        tuple(param.shape),
        str(param.dtype).removeprefix("torch."),
        param.element_size(),
        param.requires_grad,
        units.get(id(param), ""),
    )


def _in_model_order(
    params: Sequence[nn.Parameter], model: nn.Module
) -> list[nn.Parameter]:
    """Return what stage 3 shards, in order of registration: the optimizer's parameters,
    and frozen ones."""
    ours = {id(p) for p in params}
    frozen = [p for p in model.parameters() if not p.requires_grad]
    wanted = ours | {id(p) for p in frozen} - owners.lent(frozen, params)
    # Frozen ones that hold other tensors, such as 4-bit weights, stay whole.
    chosen = [
        param
        for param in model.parameters()
        if id(param) in wanted and not is_traceable_wrapper_subclass(param)
    ]
    for name, param in model.named_parameters():
        checks.check_param(name, param)
    missing = ours - set(map(id, model.parameters()))
    if missing:
        raise ValueError(
            f"{len(missing)} parameters of the optimizer are not in model; pass the"
            " module that holds all of them"
        )
    return chosen


def _initial(
    params: Sequence[nn.Parameter],
    model: nn.Module | None,
    init: Any,
    groups: Groups,
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
    if groups.shards.is_nccl:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "meta":
        device = torch.device("cpu")
    return Initial(model, init, device)


# ------------------------------------------------------------------------ agreement


def _description(
    handles: ParamHandles,
    chosen: layout.Layout,
    rule: UpdateRule,
    precision: Precision,
    model: nn.Module | None,
) -> list[str]:
    """Return what all ranks must agree on, a line each."""
    lines = chosen.lines()
    lines.append(f"update rule {rule.kernel} with {list(rule.moments)}, {precision}")
    for handle in handles:
        place = f"param group {handle.group}, position {handle.position}"
        lines.append(f"place of {handle.name!r}: {place}")
    for name, buffer in () if model is None else model.named_buffers():
        lines.append(f"buffer {name!r}: shape {tuple(buffer.shape)}, {buffer.dtype}")
    return lines


def _agree(transport: Transport, lines: Sequence[str]) -> None:
    """Compare a description over the ranks before anything is changed.

    Raises:
        ValueError: on all ranks, if any rank's differs: names the first line that does.
    """
    if transport.groups.alone:
        return
    fingerprint = bytearray(layout.fingerprint(lines))
    words = torch.frombuffer(fingerprint, dtype=torch.int64)
    words = words.to(transport.device)
    # Under a name of its own: a rank alone in editing its groups gets nothing else.
    gathered = transport.all_gather_words(words, "the description of the model")
    if transport.groups.agrees.is_fake or torch.equal(
        gathered, gathered[:1].expand_as(gathered)
    ):
        return
    raise ValueError(
        _first_difference(transport.groups.agrees.all_gather_objects(list(lines)))
    )


def _first_difference(described: Sequence[Sequence[str]]) -> str:
    for rank, lines in enumerate(described):
        pairs = zip([*lines, "(nothing)"], [*described[0], "(nothing)"], strict=False)
        for ours, first in pairs:
            if ours != first:
                return (
                    f"the ranks describe different models. Rank {rank} has: {ours}."
                    f" Rank 0 has: {first}. Every rank must build the same parameters,"
                    " in the same order, with the same options"
                )
    return "the ranks describe different models"
