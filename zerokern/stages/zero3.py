"""ZeRO-3: ZeRO-2 whose parameters are sharded too, and gathered unit by unit around their use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from .. import config
from ..buffers import ParameterBucket
from ..comm import Comm, Work
from ..layout import Layout
from ..rules import UpdateRule
from .units import ROOT, Unit, unit_modules
from .zero1 import Place, _storage_bytes
from .zero2 import Zero2


class Zero3(Zero2):
    """A unit is gathered before its forward and before its backward, and released after each.

    The order of the last iteration is a hint for gathering one unit ahead, never a promise: a unit that is needed
        and not
    there is gathered on the spot.
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
        model: nn.Module,
    ) -> None:
        """Shard the parameters and hook the units' modules. Arguments as for `Zero1`."""
        super().__init__(layout, params, places, comm, rule, precision, buckets)
        self.overlap = buckets.overlap
        self.units = {}
        for name in unit_modules(model, buckets.units):
            mine = [p for p in self.parameters if p.bucket.unit == name]
            theirs = [g for g in self.gradients if g.bucket.unit == name]
            if mine:
                self.units[name] = Unit(name, mine, theirs, comm, self.scratch)
        self.whole = False
        """Within full_params: nothing is released."""
        self._entered: Unit | None = None
        """The unit whose backward is under way."""
        self._order: list[str] = []
        self._last_order: list[str] = []
        self.rounds.ready = lambda bucket: self.units[bucket.bucket.unit].left_behind
        self.rounds.on_bucket_done = lambda bucket: self._release_if_done(self.units[bucket.bucket.unit])
        self.rounds.on_backward_end = self._end_backward
        self._handles: list[RemovableHandle] = []
        self._hook_modules(model, unit_modules(model, buckets.units))

    # ------------------------------------------------------------------ hooks

    def _hook_modules(self, model: nn.Module, modules: dict[str, nn.Module]) -> None:
        this = weakref.ref(self)  # a module must not keep an optimizer alive that its user has dropped

        def calling(name: str, method: Callable[..., None]) -> Callable[..., None]:
            def hook(*args: Any) -> None:
                zero = this()
                if zero is not None:
                    method(zero, name, *args)

            return hook

        for name, module in modules.items():
            if name in self.units or name == ROOT:
                before = calling(name, Zero3._before_forward)
                after = calling(name, Zero3._after_forward)
                self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                self._handles.append(module.register_forward_hook(after))
        inside = {id(m) for name, unit in modules.items() if name != ROOT for m in unit.modules()}
        if ROOT in self.units:
            for module in model.modules():
                if (
                    module is not model
                    and id(module) not in inside
                    and next(module.parameters(recurse=False), None) is not None
                ):
                    gather = calling(ROOT, Zero3._before_root_submodule)
                    self._handles.append(module.register_forward_pre_hook(gather, prepend=True))
        refuse = calling(ROOT, Zero3._refuse_sharded_state)
        self._handles.append(model.register_state_dict_pre_hook(refuse))
        self._handles.append(model.register_load_state_dict_pre_hook(refuse))

    def _before_forward(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if name == ROOT and not in_backward:
            self._begin_forward()
        if name not in self.units:
            return
        unit = self.units[name]
        if not in_backward:
            self._order.append(name)
        unit.gather()
        if self.overlap and not in_backward and name != ROOT:
            self._prefetch(_following(self._last_order, name))
        if torch.is_grad_enabled():
            for tensor in tree_flatten((args, kwargs))[0]:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    unit.inputs_pending += 1
                    tensor.register_hook(_Hook(self, Zero3._input_done, name))

    def _after_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        outputs = [t for t in tree_flatten(output)[0] if isinstance(t, Tensor) and t.requires_grad]
        unit = self.units.get(name)
        if outputs and unit is not None and not (in_backward and unit is self._entered):
            unit.calls_pending += 1
        come = _Hook(self, Zero3._before_backward, name)
        for tensor in outputs:
            tensor.register_hook(come)
        # A forward inside backward is a checkpoint's recomputation: its own backward follows at once.
        if not in_backward:
            if name == ROOT:
                self._end_forward()
            elif not self.whole:
                self.units[name].release()

    def _before_root_submodule(self, name: str, module: nn.Module, args: Any) -> None:
        self.units[ROOT].gather()

    def _before_backward(self, name: str, first: bool) -> None:
        self.comm.phase = "backward"
        self.rounds.enter_pass()
        unit = self.units.get(name)
        if unit is not None:
            unit.gather()
            unit.calls_pending -= first
            # All ranks come to the units in one order, while which gradients arrive may differ. So this is where
            # reductions are launched, lest they cross with gathers.
            if self._entered is not None and self._entered is not unit and self._entered.name != ROOT:
                self._entered.left_behind = self._entered.calls_pending <= 0
            self._entered = unit
            self.rounds.launch_ready()
        if self.overlap:
            self._prefetch(_following(self._last_order[::-1], name) if name != ROOT else self._last_order[-1:])

    def _input_done(self, name: str, first: bool) -> None:
        self.units[name].inputs_pending -= 1
        self._release_if_done(self.units[name])

    def _refuse_sharded_state(self, name: str, *args: Any) -> None:
        if not self.whole:
            raise RuntimeError(
                "the parameters are sharded (stage 3), so the model's state_dict cannot be read or loaded here; "
                "do it on all ranks inside `with optimizer.full_params():`"
            )

    # ------------------------------------------------------------------ phases

    def _begin_forward(self) -> None:
        """Start afresh, also after an exception in an earlier pass."""
        self.comm.phase = "forward"
        self._order = []
        if not self.whole:
            for unit in self.units.values():
                unit.release()

    def _end_forward(self) -> None:
        self._last_order = [name for name in self._order if name != ROOT]
        if not self.whole:
            for unit in self.units.values():
                unit.release()

    def _end_backward(self) -> None:
        self._entered = None
        for unit in self.units.values():
            unit.end_backward()
            if not self.whole:
                unit.release()

    def _prefetch(self, names: Sequence[str]) -> None:
        for name in names:
            self.units[name].start()

    def _release_if_done(self, unit: Unit) -> None:
        # The root unit serves the first and the last layers: it stays until backward ends.
        if unit.name != ROOT and not self.whole and unit.backward_done():
            unit.release()

    # ------------------------------------------------------------------ what differs from ZeRO-2

    def publish(self, parameters: ParameterBucket) -> Work:
        """Send nothing: the next forward gathers."""
        return Work()

    def _notice_writes(self) -> None:
        """Sharded parameters can only be edited in `full_params`, which tells their shards."""

    @contextmanager
    def full_params(self) -> Iterator[None]:
        """Gather every unit; afterwards keep the edits, unless the body raised."""
        outermost, self.whole = not self.whole, True
        try:
            for unit in self.units.values():
                unit.start()
                unit.gather()
            yield
            for unit in self.units.values():
                unit.keep_edits()
        finally:
            if outermost:
                self.whole = False
                for unit in self.units.values():
                    unit.release()

    def _parameter_bytes(self) -> int:
        return _storage_bytes([p.own for p in self.parameters])

    def detach(self) -> None:
        """Remove the hooks and leave every parameter whole. All ranks must do so."""
        super().detach()
        for handle in self._handles:
            handle.remove()
        for unit in self.units.values():
            unit.gather()
        self.whole = True


class _Hook:
    """A gradient hook, shared by the outputs of one call, that does not keep the coordinator alive."""

    def __init__(self, zero: Zero3, method: Callable[[Zero3, str, bool], None], name: str) -> None:
        self.zero, self.method, self.name = weakref.ref(zero), method, name
        self.first = True

    def __call__(self, grad: Tensor) -> None:
        zero = self.zero()
        if zero is not None:
            first, self.first = self.first, False
            self.method(zero, self.name, first)


def _following(order: Sequence[str], name: str) -> Sequence[str]:
    """Return the unit after `name`, as a sequence of at most one."""
    position = order.index(name) + 1 if name in order else len(order)
    return order[position : position + 1]
