"""ZEROKERN_CHECK: a script's first steps three times, from its start: twice in plain
torch, which tells whether it does the same twice, then as it is.

No copy beside a model can follow a loop that reads, keeps and writes what it likes. The
loop itself can.
"""

from __future__ import annotations

import atexit
import enum
import functools
import logging
import multiprocessing
import os
import random
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import config
from .comparison import Step, first_difference
from .plain import PLAIN, PlainOptimizer

LOG = logging.getLogger("zerokern")


class Phase(enum.IntEnum):
    """Which time it is."""

    PLAIN = 0
    AGAIN = 1
    """In plain torch once more."""
    OURS = 2


class Account:
    """What one optimizer has done in one phase."""

    def __init__(
        self,
        model: nn.Module | None,
        groups: list[dict[str, Any]],
    ) -> None:
        self.steps: list[Step] = []
        self._names: dict[int, str] = {}
        self._counts: dict[str, int] = {}
        if model is not None:
            for name, param in model.named_parameters():
                self._names[id(param)] = name
        self.begun = _copies(self.named(groups))
        """The weights before the first step."""

    def add_step(self) -> Step:
        """A step begins."""
        self.steps.append(Step())
        return self.steps[-1]

    def named(self, groups: list[dict[str, Any]]) -> dict[str, nn.Parameter]:
        """Return the parameters of param groups by the names that they had when they
        were first seen."""
        found = {}
        for index, group in enumerate(groups):
            for param in group["params"]:
                if id(param) not in self._names:
                    place = f"group {index}"
                    number = self._counts.get(place, 0)
                    self._counts[place] = number + 1
                    self._names[id(param)] = f"{place}, parameter {number}"
                found[self._names[id(param)]] = param
        return found


class Session:
    """The three runs of one process."""

    def __init__(self, steps: int, rank: int) -> None:
        """Begin.

        Args:
            steps: of the first optimizer, that are compared.
            rank: this process's.
        """
        self.steps = steps
        self._rank = rank
        self._accounts: dict[Phase, list[Account]] = {phase: [] for phase in Phase}
        self.begin(Phase.PLAIN)

    def begin(self, phase: Phase) -> None:
        """Begin a run: all alike, also those of a script without seeds."""
        self.phase = phase
        random.seed(self._rank)
        torch.manual_seed(self._rank)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(self._rank)

    def forget(self, phase: Phase) -> None:
        """Drop what was noted of a run."""
        self._accounts[phase].clear()

    # ---------------------------------------------------------------- the optimizers

    def plain(
        self,
        kind: type,
        args: Any,
        options: Any,
    ) -> PlainOptimizer:
        """Return what stands for an optimizer of ours in plain torch.

        Raises:
            RuntimeError: it is of a class of the user's, or the script cannot be run
                again.
        """
        if kind.__name__ not in PLAIN or kind.__module__ != "zerokern.optimizer":
            raise RuntimeError(
                f"ZEROKERN_CHECK knows no plain form of {kind.__name__}; check with a"
                " class of zerokern itself"
            )
        _refuse_no_script()
        optimizer = PLAIN[kind.__name__](*args, **options)
        account = self._open(optimizer.model, optimizer.param_groups)
        optimizer.watch(functools.partial(self._note_plain, account))
        return optimizer

    def watch(
        self,
        optimizer: Any,
        model: nn.Module | None,
    ) -> None:
        """Compare an optimizer of ours from now on."""
        with optimizer.full_params():
            account = self._open(model, optimizer.param_groups)
        number = len(self._accounts[self.phase]) - 1
        before = functools.partial(self._before, account)
        after = functools.partial(self._after, account, number)
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _open(self, model: nn.Module | None, groups: list[dict[str, Any]]) -> Account:
        account = Account(model, groups)
        self._accounts[self.phase].append(account)
        return account

    def _note_plain(
        self, account: Account, optimizer: PlainOptimizer, *, updated: bool
    ) -> None:
        """Of a step of plain torch: note what it uses, then what it leaves."""
        named = account.named(optimizer.param_groups)
        if not updated:
            step = account.add_step()
            for name, param in named.items():
                step.use(name, _copy(param.grad))
            return
        account.steps[-1].leave(_copies(named))
        is_first = account is self._accounts[self.phase][0]
        if is_first and len(account.steps) == self.steps:
            self.end_plain()

    def _before(
        self, account: Account, optimizer: Any, args: Any, options: Any
    ) -> None:
        """Of a step of ours: note what it will use. A closure has still to form it."""
        step = account.add_step()
        closures = [value for value in (*args[1:], *options.values()) if value]
        if closures:
            return
        gradients = optimizer.gradients_to_use()
        for name, param in account.named(optimizer.param_groups).items():
            if id(param) in gradients:
                step.use(name, _copy(gradients[id(param)]))

    def _after(
        self, account: Account, number: int, optimizer: Any, args: Any, options: Any
    ) -> None:
        with optimizer.full_params():
            weights = _copies(account.named(optimizer.param_groups))
        account.steps[-1].leave(weights)
        plain = self._accounts[Phase.PLAIN]
        if number < len(plain) and len(account.steps) <= len(plain[number].steps):
            found = self._difference(account, plain[number])
            if found is not None:
                raise RuntimeError(f"ZEROKERN_CHECK: {found}")
        if number == 0 and len(account.steps) == self.steps:
            self.succeed()

    def _difference(self, account: Account, plain: Account) -> str | None:
        """Return a clause on what differs in the last step, the same on all ranks."""
        steps = len(account.steps)
        found = first_difference(
            account.steps[-1],
            plain.steps[steps - 1],
            plain.begun,
            steps=steps,
        )
        everyone: list[str | None] = [found]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, found)
        for clause in everyone:
            if clause is not None:
                return f"in step {steps} {clause}"
        return None

    # ---------------------------------------------------------------- the runs

    def end_plain(self) -> NoReturn:
        """There were enough steps in plain torch: run the script from its start in the
        next phase. The run that is under way ends here."""
        self.refuse_chance()
        self.begin(Phase(self.phase + 1))
        try:
            with torch.enable_grad():
                _run_script()
            self.end_early()
        except BaseException:
            traceback.print_exc()
        _end(1)

    def end_early(self) -> None:
        """The script is at its end: nothing, or not all, was compared."""
        if any(self._accounts.values()):
            LOG.warning(
                "ZEROKERN_CHECK: the script ended before its step %d in the run %r;"
                " nothing more was compared",
                self.steps,
                self.phase.name,
            )
            _end(1)

    def refuse_chance(self) -> None:
        """Refuse a script that does not do the same twice.

        Raises:
            RuntimeError: names what differed.
        """
        first, again = self._accounts[Phase.PLAIN], self._accounts[Phase.AGAIN]
        for one, other in zip(first, again, strict=False):
            pairs = zip(one.steps, other.steps, strict=False)
            for number, (before, after) in enumerate(pairs, 1):
                found = first_difference(after, before, one.begun, steps=number)
                if found is not None:
                    raise RuntimeError(
                        "ZEROKERN_CHECK: the script does not do the same twice in plain"
                        f" torch: in step {number} {found}. Seed what is random in it,"
                        " such as a Generator of its own"
                    )

    def succeed(self) -> NoReturn:
        """All steps agree: end the process."""
        accounts = self._accounts[Phase.OURS]
        LOG.warning(
            "ZEROKERN_CHECK: %d steps of %d parameters agree with plain torch",
            self.steps,
            sum(len(account.begun) for account in accounts),
        )
        if dist.is_initialized():
            dist.barrier()
        _end(0)


def _run_script() -> None:
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(spec.name, run_name="__main__", alter_sys=True)


def _refuse_no_script() -> None:
    main = sys.modules["__main__"]
    has_script = main.__spec__ is not None or hasattr(main, "__file__")
    if multiprocessing.parent_process() is not None or not has_script:
        raise RuntimeError(
            "ZEROKERN_CHECK runs the script again from its start, which this process"
            " does not have: start it by torchrun, one process a rank, or call"
            " optimizer.check(loss_fn, batch)"
        )


def _once(init: Callable[..., None]) -> Callable[..., None]:
    """Return a function that forms the process group the first time only: the runs
    share it."""

    @functools.wraps(init)
    def once(*args: Any, **options: Any) -> None:
        if not dist.is_initialized():
            init(*args, **options)

    return once


def _copies(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in named.items()}


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu().clone()


def _end(code: int) -> NoReturn:
    """End the process where it stands: what the script does at its end is not for a
    check, such as to save a model."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


def _begin() -> Session | None:
    steps = config.check_steps()
    if not steps:
        return None
    for name, stand_in in (
        ("init_process_group", _once(dist.init_process_group)),
        ("destroy_process_group", lambda *_, **__: None),
    ):
        setattr(dist, name, stand_in)
    session = Session(steps, config.rank_of_process())
    atexit.register(session.end_early)
    return session


SESSION = _begin()
"""None unless ZEROKERN_CHECK is set."""
