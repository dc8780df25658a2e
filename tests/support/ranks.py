"""Run a function on several ranks of a real process group: forked processes, gloo, a
file for rendezvous."""

from __future__ import annotations

import gc
import io
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer imports it: here, before ranks are forked
import torch.distributed as dist

TIMEOUT_S = 20
"""A collective that takes longer fails the rank: a hang is an error, not a wait."""
JOIN_S = 240


def worlds(*usual: int, rarely: int | tuple[int, ...]) -> list[Any]:
    """Return sizes of the world as parameters. A group of ranks is what costs time:
    some are for long runs only."""
    others = (rarely,) if isinstance(rarely, int) else rarely
    params = [pytest.param(size, id=f"world{size}") for size in usual]
    return [
        *params,
        *(
            pytest.param(size, id=f"world{size}", marks=pytest.mark.long)
            for size in others
        ),
    ]


class RankError(AssertionError):
    """A rank failed; the message holds its traceback."""


def run(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `function(*args)` returns on each of `world` ranks. Results must be
    picklable.

    Forking spares every rank the import of torch, so the function may be a closure or
    defined in a test.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_enter,
                args=(theirs, folder, rank, world, function, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


class Cases:
    """What each rank returned for each of many cases; asking for a case that failed
    raises its traceback."""

    def __init__(self) -> None:
        self.values: dict[Any, list[Any]] = {}
        self.errors: dict[Any, str] = {}

    def __getitem__(self, name: Any) -> list[Any]:
        if name in self.errors:
            raise RankError(f"case {name!r}\n{self.errors[name]}")
        return self.values[name]


def run_cases(world: int, cases: Mapping[Any, Callable[[], Any]]) -> Cases:
    """Run many cases on one group of ranks, one after the other, since starting a group
    costs more than most of them.

    A case that fails on any rank, or kills it, ends its group; those after it get a new
    one.
    """
    done, waiting = Cases(), dict(cases)
    while waiting:
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(world, _run_until_failure, waiting, Path(folder))
                death = "the case did not run"
            except RankError as error:
                death = str(error)
            for index, name in enumerate(list(waiting)):
                del waiting[name]
                answers = [
                    _answer(Path(folder) / f"{r}.{index}", death) for r in range(world)
                ]
                failures = [
                    f"rank {r}:\n{a.text}"
                    for r, a in enumerate(answers)
                    if isinstance(a, _Failure)
                ]
                if failures:
                    done.errors[name] = "\n".join(failures)
                    break
                done.values[name] = answers
    return done


@dataclass
class _Failure:
    text: str


def _answer(path: Path, death: str) -> Any:
    return torch.load(path, weights_only=False) if path.exists() else _Failure(death)


def _run_until_failure(cases: Mapping[Any, Callable[[], Any]], folder: Path) -> None:
    for index, case in enumerate(cases.values()):
        try:
            answer = case()
        except BaseException:
            answer = _Failure(traceback.format_exc())
        path = folder / f"{dist.get_rank()}.{index}"
        torch.save(answer, path.with_suffix(f"{path.suffix}.part"))
        path.with_suffix(f"{path.suffix}.part").rename(path)
        if isinstance(answer, _Failure):
            break


def _collect(pipes: list[Any], processes: list[Any]) -> list[Any]:
    deadline = time.monotonic() + JOIN_S
    results: list[Any] = [None] * len(pipes)
    errors = []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            errors.append(f"rank {rank} did not finish within {JOIN_S} s")
            continue
        try:
            ok, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
        except EOFError:
            processes[rank].join(5)
            ok, value = (
                False,
                f"the process ended with exit code {processes[rank].exitcode}",
            )
        if ok:
            results[rank] = value
        else:
            errors.append(f"rank {rank}:\n{value}")
    if errors:
        raise RankError("\n".join(errors))
    return results


def _enter(
    pipe: Any,
    folder: str,
    rank: int,
    world: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    # What the parent has made is not looked through again, which would copy every page.
    gc.freeze()
    try:
        dist.init_process_group(
            "gloo",
            init_method=(Path(folder) / "rendezvous").as_uri(),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        answer = True, function(*args)
    except BaseException:
        answer = False, traceback.format_exc()
    # A pickled tensor would travel as a file descriptor of a process that is gone.
    bytes_of = io.BytesIO()
    torch.save(answer, bytes_of)
    pipe.send_bytes(bytes_of.getvalue())
    pipe.close()
