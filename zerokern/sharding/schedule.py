"""Stage 3: when units are gathered and resharded. Hooks on their modules tell where an
iteration is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from . import transforms
from .gradients import GradientBucket
from .hooks import GradientHook, Handles, ModuleHook
from .reducer import Reducer
from .sharded import ShardedParameters
from .units import ROOT, Unit, UnitState, called_beside


class ExecutionOrder:
    """The order in which the last iteration came to the units: a hint for what to
    prefetch, never a promise."""

    def __init__(self) -> None:
        self._last: list[str] = []
        self._now: list[str] = []
        self._back = 0
        """Units of the last forward that backward has come to."""

    def begin_forward(self) -> None:
        """A forward begins."""
        self._now, self._back = [], 0

    def end_forward(self, *, raised: bool) -> None:
        """A forward has ended; one that raised says nothing about the next."""
        if not raised:
            self._last = self._now

    def end_backward(self) -> None:
        """A backward has ended."""
        self._back = 0

    def forward(self, name: str) -> Sequence[str]:
        """Forward comes to a unit. Return what follows, at most one."""
        self._now.append(name)
        return _following(self._last, name, len(self._now) - 1)

    def backward(self, name: str, *, first: bool) -> Sequence[str]:
        """Backward comes to a unit, for the first time by this call of it. Return what
        follows, at most one."""
        order = self._last[::-1]
        position = self._back if first else max(self._back - 1, 0)
        self._back += first
        return _following(order, name, position)

    def backward_begins(self) -> Sequence[str]:
        """Backward comes to the outputs of the model. Return what follows, at most
        one."""
        return self._last[-1:]


def _following(order: Sequence[str], name: str, position: int) -> Sequence[str]:
    """Return what follows a unit, used at a position or wherever else it was."""
    if order[position : position + 1] != [name]:
        if name not in order:
            return []
        position = order.index(name)
    return order[position + 1 : position + 2]


class UnitBackward:
    """The state of one unit's backward: which calls and inputs it has still to come
    to, and whether more gradients of its parameters can come."""

    def __init__(self, gradients: Sequence[GradientBucket]) -> None:
        self._gradients = list(gradients)
        self._inputs = 0
        """Inputs of the module whose gradients are still to be formed."""
        self._calls = 0
        """Calls of the module that backward has still to come to."""
        self._visits, self._expected_visits = 0, 1
        """Calls of the module that this pass has come to; the most that any has. Under
        a reentrant checkpoint the forward does not tell how many there will be."""

    def add(self, gradients: GradientBucket) -> None:
        """Take a bucket of the unit's parameters."""
        self._gradients.append(gradients)

    def expect_call(self) -> None:
        """The module was called, and its outputs need gradients."""
        self._calls += 1

    def expect_input(self) -> None:
        """An input of the module needs a gradient."""
        self._inputs += 1

    def end_input(self) -> None:
        """That gradient was formed."""
        self._inputs -= 1

    @property
    def visited(self) -> bool:
        """Whether this pass has come to a call of the module before."""
        return self._visits > 0

    def visit(self, *, first: bool) -> None:
        """Backward has come to a call, and perhaps does so for the first time."""
        self._calls -= first
        self._visits += first

    def leave(self) -> None:
        """Backward has come to another unit. If it has come to all calls of this one,
        no more gradients will come."""
        done = self._calls <= 0 and self._visits >= self._expected_visits
        for bucket in self._gradients:
            bucket.set_ready(done)

    def is_done(self) -> bool:
        """Return whether all its parameters and inputs have their gradients."""
        missing = self._inputs > 0
        for bucket in self._gradients:
            missing |= not bucket.is_complete
        return not missing

    def end(self) -> None:
        """Forget the pass."""
        self._expected_visits = max(self._visits, self._expected_visits)
        self._visits = self._inputs = self._calls = 0

    def is_at_rest(self) -> bool:
        """Return whether nothing of a pass is left here."""
        return not (self._inputs or self._calls or self._visits)


class UnitSchedule:
    """Gathers a unit before its forward and before its backward, and reshards it after
    each.

    What backward reads is gathered by itself (`SavedParameters`). The hooks on outputs
    only let it be there in time, and in the same order on all ranks.
    """

    def __init__(
        self,
        parameters: ShardedParameters,
        modules: Mapping[str, nn.Module],
        gradients: Sequence[GradientBucket],
        *,
        overlap: bool,
    ) -> None:
        """Prepare. `modules` are those of all units, the model first; `gradients` are
        all trainable buckets; `overlap` is whether to prefetch."""
        self._parameters, self._units = parameters, parameters.units
        self._modules, self._overlap = dict(modules), overlap
        self._backward = {
            name: UnitBackward([g for g in gradients if g.layout.unit == name])
            for name in self._units
        }
        self._order = ExecutionOrder()
        self._entered: Unit | None = None
        """The unit whose backward is under way."""
        self._beside: Unit | None = None
        """The unit whose parts were called last without its forward."""
        self._running = False
        """The model's own forward is under way."""
        self._inside = parameters.inside
        self._reducer: Reducer | None = None
        self._handles = Handles()

    def begin(self, reducer: Reducer) -> None:
        """Hook the modules. Reductions are launched where all ranks come by."""
        self._reducer = reducer
        self._parameters.saved.gather_by(self)
        before, after = UnitSchedule._before_forward, UnitSchedule._after_forward
        for name, module in self._modules.items():
            if name in self._units or name == ROOT:
                hook = ModuleHook(module, self, before, name).before_forward()
                self._handles.add(hook)
                hook = ModuleHook(module, self, after, name).after_forward()
                self._handles.add(hook)
        gather, leave = UnitSchedule._gather_beside, UnitSchedule._leave_beside
        for name, module in called_beside(self._modules, self._units):
            hook = ModuleHook(module, self, gather, name).before_forward()
            self._handles.add(hook)
            if name != ROOT:
                hook = ModuleHook(module, self, leave, name).after_forward()
                self._handles.add(hook)

    def add(self, gradients: Sequence[GradientBucket]) -> None:
        """Take buckets of parameters that are trained from now on."""
        for bucket in gradients:
            self._backward[bucket.layout.unit].add(bucket)

    def detach(self) -> None:
        """Remove the hooks."""
        self._handles.remove()

    # ---------------------------------------------------------------- forward

    def _before_forward(
        self, name: str, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if name == ROOT and not in_backward and ROOT not in self._inside:
            # Afresh, also after an exception in an earlier pass.
            self._running = True
            self._order.begin_forward()
            self._reshard_all()
        self._inside.append(name)
        unit = self._units.get(name)
        if unit is not None:
            unit.unshard()
            if self._running and not in_backward and name != ROOT:
                self._prefetch(self._order.forward(name))
            if torch.is_grad_enabled() and transforms.innermost() is None:
                self._expect_inputs(name, (args, kwargs))
        self._parameters.saved.enter(module)

    def _expect_inputs(self, name: str, inputs: Any) -> None:
        for tensor in tree_flatten(inputs)[0]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                self._backward[name].expect_input()
                done = GradientHook(self, UnitSchedule._input_done, name)
                tensor.register_hook(done)

    def _after_forward(
        self, name: str, module: nn.Module, args: Any, output: Any
    ) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        unit, raised = self._units.get(name), output is None
        if self._inside:
            self._inside.pop()
        outputs = []
        if transforms.innermost() is None:
            for tensor in tree_flatten(output)[0]:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    outputs.append(tensor)
        if outputs and unit is not None and not (in_backward and unit is self._entered):
            self._backward[name].expect_call()
        watched = [*outputs, *_bases(outputs, args)]
        # A forward inside backward is a checkpoint's recomputation: its own backward
        # follows at once.
        if not in_backward:
            # Of an exception the user is being told already.
            with suppress(RuntimeError) if raised else nullcontext():
                if name in self._inside:
                    pass  # it has called itself
                elif name == ROOT:
                    self._running = False
                    self._order.end_forward(raised=raised)
                    self._reshard_all()
                elif unit is not None:
                    unit.reshard()
        self._parameters.saved.leave(module)
        if watched:
            comes = GradientHook(self, UnitSchedule._before_backward, name)
            for tensor in watched:
                tensor.register_hook(comes)

    def _gather_beside(self, name: str, module: nn.Module, *_: Any) -> None:
        unit = self._units[name]
        if name != ROOT and name not in self._inside:
            self._parameters.saved.enter(module)
        if unit.state is UnitState.WHOLE:
            return
        beside, self._beside = self._beside, unit
        if beside is not None and beside.name not in self._inside:
            beside.reshard()
        unit.unshard()
        if name == ROOT:
            self._beside = None

    def _leave_beside(self, name: str, module: nn.Module, *_: Any) -> None:
        self._parameters.saved.leave(module)

    @contextmanager
    def calling(self, module: nn.Module, args: Any, kwargs: Any) -> Iterator[list[Any]]:
        """Gather around a method of a module as around its forward. The body puts its
        output into the list."""
        name = ROOT
        for title, candidate in self._modules.items():
            if title != ROOT and any(module is inner for inner in candidate.modules()):
                name = title
                break
        self._before_forward(name, module, args, kwargs)
        output: list[Any] = []
        unit = self._units.get(name)
        try:
            with nullcontext() if unit is None else unit.held():
                yield output
        finally:
            self._after_forward(name, module, args, output[0] if output else None)

    # ---------------------------------------------------------------- backward

    def _before_backward(self, name: str, first: bool) -> None:
        """The gradient of an output of a call has come."""
        assert self._reducer is not None
        self._reducer.enter_pass()
        unit, late = self._units.get(name), False
        if unit is not None:
            backward = self._backward[name]
            # A gradient of an output that was handed on as it came in may follow when
            # the unit is done on some ranks, and not on those that left parameters of
            # it unused: nobody gathers again.
            late = not first and backward.visited
            if not (late and backward.is_done()):
                unit.unshard()
            backward.visit(first=first)
            self._advance(unit)
        if late:
            return
        if name == ROOT:
            self._prefetch(self._order.backward_begins())
        else:
            self._prefetch(self._order.backward(name, first=first))

    def need(self, unit: Unit) -> None:
        """Backward reads a parameter that a forward has saved, and its unit is not
        whole."""
        in_backward = torch._C._current_graph_task_id() != -1
        assert self._reducer is not None
        with torch.no_grad():
            if in_backward:
                self._reducer.enter_pass()
            unit.unshard()
            if in_backward:
                self._advance(unit)

    def _advance(self, unit: Unit) -> None:
        """Backward is in a unit. All ranks come to units in one order, while which
        gradients arrive may differ. So reductions are launched here."""
        assert self._reducer is not None
        # The outputs of units may be outputs of the model, too.
        if unit.name == ROOT:
            return
        entered, self._entered = self._entered, unit
        if entered is None or entered is unit:
            return
        self._backward[entered.name].leave()
        self._reducer.launch_ready()

    def _input_done(self, name: str, first: bool) -> None:
        self._backward[name].end_input()
        self._reshard_if_done(name)

    def gradients_complete(self, bucket: GradientBucket) -> None:
        """All gradients of a bucket have come."""
        self._reshard_if_done(bucket.layout.unit)

    def _reshard_if_done(self, name: str) -> None:
        # The root unit serves the first and the last layers: it stays until backward
        # ends.
        if name != ROOT and self._backward[name].is_done():
            self._units[name].reshard()

    def end_backward(self) -> None:
        """Forget the pass."""
        self._entered = None
        self._order.end_backward()
        for backward in self._backward.values():
            backward.end()
        self._reshard_all()

    def is_at_rest(self) -> bool:
        """Return whether nothing of a backward pass is left."""
        return all(backward.is_at_rest() for backward in self._backward.values())

    def _reshard_all(self) -> None:
        for unit in self._units.values():
            if unit.state is not UnitState.SHARDED and unit.name not in self._inside:
                unit.reshard()

    def _prefetch(self, names: Sequence[str]) -> None:
        if not self._overlap or transforms.innermost() is not None:
            return
        for name in names:
            unit = self._units[name]
            if unit.state is UnitState.SHARDED:
                unit.start()


def _bases(outputs: Sequence[Tensor], args: Any) -> list[Tensor]:
    """Return what the outputs are views of. A view that is changed in place leaves its
    node in the graph, and a hook with it: autograd then has the base changed instead,
    whose node stays. What came in by the arguments is not ours."""
    bases = {}
    for tensor in outputs:
        base = tensor._base
        if base is not None and base.requires_grad:
            bases[id(base)] = base
    if not bases:
        return []
    for tensor in tree_flatten(args)[0]:
        if isinstance(tensor, Tensor):
            bases.pop(id(tensor), None)
            bases.pop(id(tensor._base), None)
    return list(bases.values())
