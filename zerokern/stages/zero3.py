"""ZeRO-3: ZeRO-2 whose parameters are sharded too, and gathered unit by unit around
their use."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from .. import config
from ..buffers import ParameterBucket
from ..comm import Comm, Work
from ..layout import Bucket, Layout
from ..rules import UpdateRule
from .course import Course
from .hooks import GradientHook, ModuleHook
from .initial import Initial, make_equal
from .showing import showing
from .units import ROOT, Unit, unit_modules
from .zero1 import Place
from .zero2 import Zero2


class Zero3(Zero2):
    """A unit is gathered before its forward and before its backward, and released after
    each.

    The order of the last iteration is a hint for gathering one unit ahead, never a
    promise: a unit that is needed and not there is gathered on the spot.
    """

    parameters_sharded = True

    def __init__(
        self,
        layout: Layout,
        params: Sequence[nn.Parameter],
        places: Sequence[Place],
        comm: Comm,
        rule: UpdateRule,
        precision: config.Precision,
        buckets: config.Buckets,
        *,
        device: torch.device,
        initial: Initial | None = None,
        model: nn.Module,
    ) -> None:
        """Shard the parameters and hook the units' modules. Arguments as for
        `Zero1`."""
        super().__init__(
            layout,
            params,
            places,
            comm,
            rule,
            precision,
            buckets,
            device=device,
            initial=initial,
        )
        self.overlap = buckets.overlap
        self.units: dict[str, Unit] = {}
        for name in unit_modules(model, buckets.units):
            mine = [p for p in self.parameters if p.bucket.unit == name]
            theirs = [g for g in self.gradients if g.bucket.unit == name]
            if mine:
                self.units[name] = Unit(
                    name, len(self.units), mine, theirs, comm, self.scratch
                )
        self.whole = False
        """Within full_params: nothing is released."""
        self._entered: Unit | None = None
        """The unit whose backward is under way."""
        self._course = Course()
        self.rounds.ready = lambda bucket: self.units[bucket.bucket.unit].left_behind
        self.rounds.on_bucket_done = lambda bucket: self._release_if_done(
            self.units[bucket.bucket.unit]
        )
        self.rounds.on_backward_end = self._end_backward
        self._running = False
        """The model's own forward is under way."""
        self._modules = unit_modules(model, buckets.units)
        self._hooks: list[ModuleHook] = []
        self._hook_modules(model)

    # ------------------------------------------------------------------ hooks

    def _hook_modules(self, model: nn.Module) -> None:
        for name, module in self._modules.items():
            if name in self.units or name == ROOT:
                self._hooks.append(
                    ModuleHook(
                        module, self, Zero3._before_forward, name
                    ).before_forward()
                )
                self._hooks.append(
                    ModuleHook(module, self, Zero3._after_forward, name).after_forward()
                )
        inside = {
            id(m)
            for name, unit in self._modules.items()
            if name != ROOT
            for m in unit.modules()
        }
        if ROOT in self.units:
            for module in model.modules():
                has_own = next(module.parameters(recurse=False), None) is not None
                if module is not model and id(module) not in inside and has_own:
                    self._hooks.append(
                        ModuleHook(
                            module, self, Zero3._before_root_submodule, ROOT
                        ).before_forward()
                    )
        self._hooks.append(
            ModuleHook(
                model, self, Zero3._refuse_sharded_state, ROOT
            ).around_state_dict()
        )

    def register_forward_method(
        self, module: nn.Module, name: str
    ) -> Callable[..., Any]:
        """Gather around a method as around a forward. Return the method."""
        original = super().register_forward_method(module, name)
        unit = next(
            (
                u
                for u, m in self._modules.items()
                if u != ROOT and any(module is x for x in m.modules())
            ),
            ROOT,
        )
        this = weakref.ref(self)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            zero = this()
            if zero is None:
                return original(*args, **kwargs)
            zero._before_forward(unit, module, args, kwargs)
            output = None
            try:
                with zero._hold(unit):
                    output = original(*args, **kwargs)
                return output
            finally:
                zero._after_forward(unit, module, args, output)

        setattr(module, name, method)
        return method

    @contextmanager
    def _hold(self, name: str) -> Iterator[None]:
        """Keep a unit whole during a method that may call forwards."""
        held = [self.units[name]] if name in self.units else []
        try:
            for unit in held:
                unit.held += 1
            yield
        finally:
            for unit in held:
                unit.held -= 1

    def _before_forward(
        self, name: str, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if name == ROOT and not in_backward:
            self._begin_forward()
        if name not in self.units:
            return
        unit = self.units[name]
        unit.gather()
        if self._running and not in_backward and name != ROOT:
            self._prefetch(self._course.forward(name))
        if torch.is_grad_enabled():
            for tensor in tree_flatten((args, kwargs))[0]:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    unit.inputs_pending += 1
                    tensor.register_hook(GradientHook(self, Zero3._input_done, name))

    def _after_forward(
        self, name: str, module: nn.Module, args: Any, output: Any
    ) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        outputs = [
            t
            for t in tree_flatten(output)[0]
            if isinstance(t, Tensor) and t.requires_grad
        ]
        unit = self.units.get(name)
        if outputs and unit is not None and not (in_backward and unit is self._entered):
            unit.calls_pending += 1
        come = GradientHook(self, Zero3._before_backward, name)
        for tensor in (*outputs, *_bases(outputs, args)):
            tensor.register_hook(come)
        # A forward inside backward is a checkpoint's recomputation: its own backward
        # follows at once.
        if not in_backward:
            if name == ROOT:
                self._end_forward(raised=output is None)
            elif unit is not None:
                self._release(unit, quiet=output is None)

    def _before_root_submodule(
        self, name: str, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        self.units[ROOT].gather()

    def _before_backward(self, name: str, first: bool) -> None:
        self.comm.phase = "backward"
        self.rounds.enter_pass()
        unit, late = self.units.get(name), False
        if unit is not None:
            # A gradient of an output that was handed on as it came in may follow when
            # the unit is done on some ranks, and not on those that left parameters of
            # it unused: nobody gathers again.
            late = not first and unit.visited
            if not (late and unit.backward_done()):
                unit.gather()
            unit.visit(first=first)
            # All ranks come to the units in one order, while which gradients arrive may
            # differ. So this is where reductions are launched, lest they cross with
            # gathers.
            if (
                self._entered is not None
                and self._entered is not unit
                and self._entered.name != ROOT
            ):
                self._entered.leave()
            self._entered = unit
            self.rounds.launch_ready()
        if not late:
            course = self._course
            self._prefetch(
                course.backward_begins()
                if name == ROOT
                else course.backward(name, first=first)
            )

    def _input_done(self, name: str, first: bool) -> None:
        self.units[name].inputs_pending -= 1
        self._release_if_done(self.units[name])

    def _refuse_sharded_state(self, name: str, *args: Any) -> None:
        if not self.whole:
            raise RuntimeError(
                "the parameters are sharded (stage 3), so the model's state_dict cannot"
                " be read or loaded here; do it on all ranks inside `with"
                " optimizer.full_params():`"
            )

    # ------------------------------------------------------------------ phases

    def _begin_forward(self) -> None:
        """Start afresh, also after an exception in an earlier pass."""
        self.comm.phase = "forward"
        self._running = True
        self._course.begin_forward()
        for unit in self.units.values():
            self._release(unit)

    def _end_forward(self, *, raised: bool) -> None:
        self._running = False
        self._course.end_forward(raised=raised)
        for unit in self.units.values():
            self._release(unit, quiet=raised)

    def _end_backward(self) -> None:
        self._entered = None
        self._course.end_backward()
        for unit in self.units.values():
            unit.end_backward()
            self._release(unit)

    def _release(self, unit: Unit, *, quiet: bool = False) -> None:
        """Release a unit that nobody holds; quietly after an exception, of which the
        user is being told already."""
        if not self.whole and not unit.held:
            with suppress(RuntimeError) if quiet else nullcontext():
                unit.release()

    def _prefetch(self, names: Sequence[str]) -> None:
        for name in names if self.overlap else ():
            self.units[name].start()

    def _release_if_done(self, unit: Unit) -> None:
        # The root unit serves the first and the last layers: it stays until backward
        # ends.
        if unit.name != ROOT and unit.backward_done():
            self._release(unit)

    # --------------------------------------------------------- what differs from ZeRO-2

    def place(
        self,
        bucket: Bucket,
        params: Sequence[nn.Parameter],
        precision: config.Precision,
        rule: UpdateRule,
    ) -> ParameterBucket:
        """Keep the shard only, of parameters that are made here and now if they were on
        the meta device."""
        if any(param.is_meta for param in params):
            assert self.initial is not None
            theirs = [b for b in self.layout.buckets if b.unit == bucket.unit]
            members = {
                self.names[b.slots[0].param]: [
                    self.params[slot.param] for slot in b.slots
                ]
                for b in theirs
            }
            self.initial.make(
                [param for chosen in members.values() for param in chosen]
            )
            make_equal(members, self.comm)
        parameters = super().place(bucket, params, precision, rule)
        parameters.empty()
        return parameters

    def unit_titles(self) -> list[str]:
        """Return the names of the units, for messages."""
        return [unit.title for unit in self.units.values()]

    def gather_unit(self, index: int) -> None:
        """Take part in the gather of a unit, for the others' sake."""
        unit = list(self.units.values())[index]
        unit.gather()
        self._release(unit)

    def publish(self, parameters: ParameterBucket) -> Work:
        """Send nothing: the next forward gathers."""
        return Work()

    def _notice_writes(self) -> None:
        """Sharded parameters can only be edited in `full_params`, which tells their
        shards."""
        for unit in self.units.values():
            unit.check_absent(self.names)

    def _tell_autograd(self, parameters: ParameterBucket) -> None:
        """Say nothing: the shard was updated, and what backward uses is as it was."""

    @contextmanager
    def full_params(self) -> Iterator[None]:
        """Make every parameter whole. Edits are kept, unless the body raised on any
        rank."""
        if self.whole:
            yield
            return
        self.whole = True
        try:
            with showing(
                list(self.units.values()), self.comm, self.scratch.device, self.names
            ):
                yield
        finally:
            self.whole = False

    def detach(self) -> None:
        """Remove the hooks and leave every parameter whole. All ranks must do so."""
        super().detach()
        for hook in self._hooks:
            hook.remove()
        for unit in self.units.values():
            unit.gather()
        self.whole = True


def _bases(outputs: Sequence[Tensor], args: Any) -> list[Tensor]:
    """Return what the outputs are views of. A view that is changed in place leaves its
    node in the graph, and a hook with it: autograd then has the base changed instead,
    whose node stays. What came in by the arguments is not ours.
    """
    inputs = [t for t in tree_flatten(args)[0] if isinstance(t, Tensor)]
    known = {id(t) for t in (*inputs, *(t._base for t in inputs))}
    bases = {
        id(t._base): t._base
        for t in outputs
        if t._base is not None and t._base.requires_grad
    }
    return [base for key, base in bases.items() if key not in known]
