"""Which param group of a state dict belongs to which of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

Group = MutableMapping[str, Any]
SavedGroup = Mapping[str, Any]
"""As in a state dict: its "params" are keys of the state."""

NAMES = "param_names"
"""What torch calls the names of a group that was made of named parameters."""


def pairs_of(
    groups: Sequence[Group],
    saved: Sequence[SavedGroup],
) -> list[tuple[Group, SavedGroup, list[Any]]]:
    """Return each group with the saved one that belongs to it, and the keys of its
    parameters in the state, in order.

    By name where both sides have the same names, whatever their order; else by
    position, as in torch.

    Raises:
        ValueError: the groups differ in size, or in the names of their parameters.
    """
    if _names(groups) is not None and _names(groups) == _names(saved):
        return [_named(group, saved) for group in groups]
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved]
    if sizes != saved_sizes:
        raise ValueError(
            f"the state has param groups of {saved_sizes} parameters, this optimizer of"
            f" {sizes}: it is of another model"
        )
    return [
        (group, of_group, list(of_group["params"]))
        for group, of_group in zip(groups, saved, strict=True)
    ]


def names_of(group: SavedGroup) -> Sequence[str] | None:
    """Return the names of a group's parameters; None if there are none, or others than
    parameters, since the group was edited."""
    names: Sequence[str] | None = group.get(NAMES)
    if names is None or len(names) != len(group["params"]):
        return None
    return names


def _names(groups: Sequence[SavedGroup]) -> list[str] | None:
    """Return the names of all parameters, sorted; None if some have none, or share
    one."""
    names: list[str] = []
    for group in groups:
        of_group = names_of(group)
        if of_group is None:
            return None
        names += of_group
    names.sort()
    return names if len(set(names)) == len(names) else None


def _named(
    group: Group,
    saved: Sequence[SavedGroup],
) -> tuple[Group, SavedGroup, list[Any]]:
    for of_group in saved:
        if set(of_group[NAMES]) == set(group[NAMES]):
            keys = dict(zip(of_group[NAMES], of_group["params"], strict=True))
            return group, of_group, [keys[name] for name in group[NAMES]]
    raise ValueError(
        f"a param group of this optimizer has {sorted(group[NAMES])}; no group of the"
        " state has the same parameters: build the groups as they were when it was"
        " saved"
    )
