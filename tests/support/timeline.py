"""What happens in an iteration, in order: what is computed, sent, waited for and
updated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

from zerokern.groups import Group
from zerokern.sharding.updater import Updater
from zerokern.transport import Pending, Transport


def _block_hooks(name: str, module: nn.Module, events: list[str]) -> list[Any]:
    """Note when a block computes; return the handles of the hooks that do so."""

    def noted(event: str) -> Callable[..., None]:
        return lambda *_: events.append(event)

    # Inside of the optimizer's own hooks, so that what these wait for is not part of
    # the block's time.
    inside = next(module.children())
    begin, end = noted(f"begin forward {name}"), noted(f"end forward {name}")
    return [
        inside.register_forward_pre_hook(begin),
        module.register_forward_hook(end, prepend=True),
        module.register_full_backward_pre_hook(noted(f"begin backward {name}")),
        module.register_full_backward_hook(noted(f"end backward {name}")),
    ]


@contextmanager
def recorded(optimizer: Any, blocks: dict[str, nn.Module]) -> Iterator[list[str]]:
    """Note in one list, as they happen: "issue NAME", "wait NAME", "update BUCKET",
    "begin forward BLOCK" and so on.

    NAME is that of the collective, such as "all_gather of 'blocks.0'".
    """
    events: list[str] = []
    start, wait, update = Transport.point_to_point, Pending.wait, Updater.update

    def launch(transport: Transport, name: str, transfers: Any, group: Group) -> Any:
        events.append(f"issue {name}")
        return start(transport, name, transfers, group)

    def waited(pending: Pending) -> None:
        events.append(f"wait {pending.name}")
        wait(pending)

    def updated(updater: Updater, index: int, *args: Any, **options: Any) -> None:
        events.append(f"update {updater.buckets[index].layout.index}")
        update(updater, index, *args, **options)

    handles = [
        handle
        for name, module in blocks.items()
        for handle in _block_hooks(name, module, events)
    ]
    with (
        mock.patch.object(Transport, "point_to_point", launch),
        mock.patch.object(Pending, "wait", waited),
        mock.patch.object(Updater, "update", updated),
    ):
        yield events
    for handle in handles:
        handle.remove()
