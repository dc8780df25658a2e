"""The command `zerokern`: plan a training run, or rehearse a script."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .config import Buckets
from .plan import arguments, quantities, report
from .plan.advice import advise
from .plan.calibration import calibrate
from .plan.forecast import Forecast, Setting, Strategy, forecast
from .plan.machine import Machine
from .plan.script import dryrun
from .plan.workload import Workload, find, of_count


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0, or 2 after a sentence on what cannot be done as asked.
    """
    parser = argparse.ArgumentParser(prog="zerokern", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_plan(commands)
    _add_dryrun(commands)
    options = parser.parse_args(argv)
    try:
        options.run(options)
    except ValueError as error:
        print(f"zerokern: {error}", file=sys.stderr)
        return 2
    return 0


# ---------------------------------------------------------------------- plan


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help=(
            "what training a model takes, per stage and recipe: memory, collectives,"
            " time; and which to choose"
        ),
        description=(
            "Builds the model on fake tensors, trains it for two steps in a fake world"
            " with zerokern's own code, and reports per rank. Nothing is downloaded,"
            " computed or sent."
        ),
    )
    plan.set_defaults(run=_plan)
    arguments.add_to(plan)


def _plan(options: argparse.Namespace) -> None:
    for path in (options.machine, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(
                f"{path}: there is no folder {path.parent}; make it first, or name"
                " another file"
            )
    if options.calibrate:
        _calibrate(options.machine or Path("machine.json"))
        return
    workload = _workload(options, arguments.DTYPES[options.dtype])
    buckets = Buckets(bytes=options.bucket)
    setting = Setting(
        world=options.gpus,
        machine=_machine(options),
        accumulate=options.accumulate,
        buckets=buckets,
    )
    room = options.gpu_memory - options.reserve
    if room <= 0:
        raise ValueError(
            f"--reserve {quantities.gib(options.reserve)} leaves nothing of"
            " --gpu-memory; give less"
        )
    found = _forecasts(options, workload, setting, room)

    def late(strategy: Strategy) -> Forecast:
        late_buckets = replace(buckets, gather_in_forward=True)
        with _status("rehearsing gathers in forward", quiet=options.json):
            return forecast(workload, strategy, replace(setting, buckets=late_buckets))

    advice = advise(found, options.gpu_memory, options.reserve, late)
    if options.plot:
        report.plot(found, room, options.plot, workload.per)
    if options.json:
        print(json.dumps(report.as_json(found, advice, room), indent=2))
        return
    print(
        f"{workload.title}: {found[0].params / 1e9:,.3g} B parameters on"
        f" {setting.world} ranks, {workload.tokens:,} {workload.per} x"
        f" {setting.accumulate} a rank and step; machine: {setting.machine.name}"
    )
    _print_table(report.table(found, room, workload.per))
    choice = f"Take {advice.strategy.title}" if advice.strategy else "There is no way"
    print(f"\n{choice}: {advice.reason}.")


def _forecasts(
    options: argparse.Namespace, workload: Workload, setting: Setting, room: int
) -> list[Forecast]:
    """Rehearse what was asked for; with checkpointing too if nothing fits without."""
    found: list[Forecast] = []
    for checkpointing in (True,) if options.checkpointing else (False, True):
        for name in dict.fromkeys(options.recipe):
            for stage in sorted(set(options.stage)):
                strategy = Strategy(
                    stage=stage,
                    recipe=name,
                    precision=arguments.RECIPES[name],
                    checkpointing=checkpointing,
                )
                with _status(f"rehearsing {strategy.title}", quiet=options.json):
                    found.append(forecast(workload, strategy, setting))
        if found[0].peak is None or any(f.needs <= room for f in found):
            break
    return found


def _workload(options: argparse.Namespace, dtype: torch.dtype) -> Workload:
    given = {"batch": options.batch, "sequence": options.sequence, "dtype": dtype}
    if (options.model is None) == (options.params is None):
        raise ValueError(
            "give a model (package.module:factory or config.json) or --params, one of"
            " them"
        )
    return (
        of_count(options.params, options.layers, **given)
        if options.params
        else find(options.model, **given)
    )


def _machine(options: argparse.Namespace) -> Machine:
    machine = Machine() if options.machine is None else Machine.load(options.machine)
    names = ("per_node", "intra", "inter", "compute", "peak")
    given = {
        name: getattr(options, name)
        for name in names
        if getattr(options, name) is not None
    }
    return replace(machine, **given)


def _calibrate(path: Path) -> None:
    with _status("training small models on a few ranks, for some minutes", quiet=False):
        machine = calibrate()
    if machine is not None:
        machine.save(path)
        print(f"{path}: {machine}")


# ---------------------------------------------------------------------- dryrun


def _add_dryrun(commands: Any) -> None:
    parser = commands.add_parser(
        "dryrun",
        help="run a training script as one rank of any world, on fake tensors",
        description=(
            "Runs the script as torchrun would start it, on fake tensors and a fake"
            " process group, for a few optimizer steps, and reports the log of"
            " collectives and the bytes in use."
        ),
    )
    parser.set_defaults(run=_dryrun)
    parser.add_argument(
        "--world", type=arguments.COUNT, required=True, metavar="N", help="ranks"
    )
    parser.add_argument(
        "--rank", type=int, default=0, help="which one to be (default 0)"
    )
    parser.add_argument(
        "--per-node",
        type=arguments.COUNT,
        default=8,
        metavar="N",
        help="ranks of a node, for LOCAL_RANK",
    )
    parser.add_argument(
        "--steps",
        type=arguments.COUNT,
        default=2,
        help="optimizer steps after which to stop (default 2)",
    )
    parser.add_argument(
        "--json", action="store_true", help="everything, with log and timeline, as JSON"
    )
    parser.add_argument(
        "script", type=Path, help="the training script; its own arguments follow"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _dryrun(options: argparse.Namespace) -> None:
    with contextlib.redirect_stdout(sys.stderr):  # what the script prints
        outcome = dryrun(
            options.script,
            options.arguments,
            world=options.world,
            rank=options.rank,
            per_node=options.per_node,
            steps=options.steps,
        )
    if options.json:
        print(json.dumps(report.outcome_as_json(outcome), indent=2))
        return
    print(
        f"{options.script} as rank {outcome.rank} of {outcome.world}: {outcome.steps}"
        f" steps, {outcome.params / 1e9:,.3g} B trainable parameters. Every rank holds"
        " and sends the same."
    )
    for rows in report.outcome_tables(outcome):
        _print_table(rows, turned=False)


# ---------------------------------------------------------------------- the terminal


def _print_table(rows: Sequence[Sequence[str]], *, turned: bool = True) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        raise ValueError(
            "tables need rich: pip install 'zerokern[plan]', or ask for --json"
        ) from None
    heading, *body = zip(*rows, strict=True) if turned else rows
    table = Table(box=None)
    for index, title in enumerate(heading):
        table.add_column(title, justify="right" if index else "left", overflow="fold")
    for row in body:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@contextlib.contextmanager
def _status(text: str, *, quiet: bool) -> Iterator[None]:
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield
