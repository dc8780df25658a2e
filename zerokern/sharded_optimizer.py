"""An optimizer as torch knows it, on top of a coordinator: what all update rules
share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import build, checks, owners
from .checking.checked import Checked
from .config import Buckets, Precision
from .eager import eager
from .groups import Groups
from .observation import Observation, observed
from .options import signature_of
from .rules import UpdateRule
from .sharding.coordinator import Coordinator
from .sharding.placeholders import without_placeholders
from .state import OptimizerState
from .user_edits import UserEdits


class _Parts(NamedTuple):
    """The parts that go when a newer optimizer takes the parameters over."""

    coordinator: Coordinator
    state: OptimizerState
    observation: Observation


class ShardedOptimizer(Checked):
    """Base of the optimizers: torch's contract, and the methods beyond it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = signature_of(cls.__init__)  # type: ignore[attr-defined]

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        rule: Callable[[Sequence[Mapping[str, Any]]], UpdateRule],
        *,
        stage: int = 1,
        model: nn.Module | None = None,
        process_group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        precision: Precision | None = None,
        buckets: Buckets | None = None,
        max_grad_norm: float | None = None,
        init: Callable[[nn.Module], Any] | Any | None = None,
    ) -> None:
        """Check everything, agree with the other ranks, then shard.

        `rule` makes the update rule of the param groups; the other arguments are those
        of torch.optim.Optimizer and of `Options`.
        """
        buckets = buckets or Buckets()
        checks.check_options(stage, model, process_group, mesh, max_grad_norm, buckets)
        self._parts: _Parts | None = None
        self._rule = rule
        self._is_built = False
        super().__init__(checks.checked_groups(params), defaults)
        for group in self.param_groups:
            checks.check_hyper(group)
        self.stage, self.max_grad_norm = stage, max_grad_norm
        blueprint = build.blueprint(
            self.param_groups,
            rule(self.param_groups),
            Groups.over(process_group if mesh is None else mesh.get_group()),
            stage=stage,
            model=model,
            precision=precision or Precision(),
            buckets=buckets,
            init=init,
        )
        params = [handle.param for handle in blueprint.handles]
        owners.release(params)
        coordinator = Coordinator(blueprint, self.param_groups)
        blueprint.transport.end_construction()
        owners.claim(params, self)
        state = OptimizerState(coordinator)
        self._parts = _Parts(coordinator, state, Observation(coordinator))
        self._is_built = True
        self._loss_scale: Tensor | None = None
        """The divisor of the gradients in the coming step."""
        # From the first moment on: an empty state makes DCP take a step.
        self._edits = UserEdits(self.param_groups, coordinator.handles)
        self._edits.show(self.state, state.by_param())
        self.begin_check(model)

    def _live(self) -> _Parts:
        if self._parts is None:
            raise RuntimeError(
                "a newer optimizer has taken these parameters over; use that one"
            )
        return self._parts

    @property
    def coordinator(self) -> Coordinator:
        """The parts at work, for who looks behind the scenes, such as the planner."""
        return self._live().coordinator

    def observation(self, *, collective: bool) -> Observation:
        """Return what looks at the parts, after edits if all ranks do: `collective`."""
        if collective:
            self._follow_edits()
        return self._live().observation

    def let_go(self) -> None:
        """Leave the parameters whole, for a newer optimizer. All ranks must call it."""
        if self._parts is not None:
            self._parts.coordinator.detach()
            self._parts = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. All ranks must do so, outside of backward.

        Raises:
            ValueError: it cannot be trained by this optimizer. Nothing was changed.
        """
        if not getattr(self, "_is_built", False):
            super().add_param_group(param_group)
            return
        (group,) = checks.checked_groups([param_group])
        before = list(self.param_groups)
        super().add_param_group(group)
        try:
            checks.check_hyper(self.param_groups[-1])
            self._follow_edits()
        except Exception:
            self.param_groups[:] = before
            raise

    def _follow_edits(self) -> Coordinator:
        """Follow what was done to param groups and state. Return the coordinator."""
        coordinator, state, _ = self._parts or self._live()
        groups, edits = self.param_groups, self._edits
        if coordinator.groups is groups and edits.are_none(groups, self.state):
            return coordinator
        coordinator.refuse_in_join("editing param groups or state")
        with torch.no_grad():
            edits.adopt(self.state, state.reset)
            if coordinator.groups is not groups or not edits.has_members(groups):
                rule = self._rule(groups) if groups else coordinator.blueprint.rule
                owners.release(edits.added(groups, coordinator.handles))
                build.follow(coordinator, groups, rule)
                owners.claim([handle.param for handle in coordinator.handles], self)
                edits.note_groups(groups, coordinator.handles)
                edits.show(self.state, state.by_param())
        return coordinator

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is not reduced yet, update this rank's shards, make parameters
        whole again (stages 1 and 2).

        A step whose gradients are not finite, on any rank, changes nothing on all of
        them and is counted (`skipped_steps`).

        Args:
            closure: computes the loss again and returns it; it may call zero_grad and
                backward.

        Raises:
            TypeError: the closure does not return a loss.
            RuntimeError: a newer optimizer has taken over, or a parameter was moved out
                of its buffer.
        """
        coordinator, state, _ = self._parts or self._live()
        # torch's own scaler leaves its scale here, or None after the user's
        # scaler.unscale_(optimizer).
        loss_scale = getattr(self, "grad_scale", self._loss_scale)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            checks.check_loss(loss)
        if loss_scale is not None:
            coordinator.refuse_in_backward("a loss scale")
        self._follow_edits()
        coordinator.synchronize()
        coordinator.step(self.max_grad_norm, loss_scale)
        if state.is_consolidated:
            state.forget()
        self._loss_scale = None
        return loss

    __deepcopy__ = __reduce_ex__ = checks.refuse_copy  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. `model.zero_grad()` does the same."""
        with without_placeholders():
            super().zero_grad(set_to_none)
        self.coordinator.zero_grad(all_of=self._edits.has_members(self.param_groups))

    def state_dict(self) -> dict[str, Any]:
        """Return the state without communicating.

        In a world of one, or after `consolidate_state_dict`, it is in torch's layout,
        fp32. Else it is this rank's shards as they are stored, labelled by `range`,
        which load at the same world size, rank and precision only; a warning says so
        once.
        """
        packed = super().state_dict()
        packed["state"] = self._live().state.to_save(packed["state"])
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's layout or our own, in place, rounded to the formats of this
        optimizer. Nothing is sent.

        Raises:
            ValueError: it is of another model or another sharding. Nothing was changed.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._follow_edits()
        self._live().state.load_into(self.param_groups, state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def full_state_dict(self, *, to: int | None = None) -> dict[str, Any]:
        """Gather the state in torch's layout into host memory. All ranks must call it.

        Args:
            to: the rank that gets it; the others get {}. None: every rank.
        """
        coordinator = self._follow_edits()
        with torch.no_grad():
            gathered = self._live().state.gather(to)
        if to is not None and to != coordinator.transport.groups.shards.rank:
            return {}
        packed = super().state_dict()
        packed["state"] = gathered
        return packed

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state so that `state_dict()` on rank `to` returns all of it, until
        the next step. All ranks must call it.

        Lightning and torch's ZeroRedundancyOptimizer know this name.
        """
        with torch.no_grad():
            self._live().state.consolidate(to)

    @eager
    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float | Tensor,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the total gradient norm, as `torch.nn.utils.clip_grad_norm_` does. All
        ranks must call it.

        The coefficient is applied inside the update; at once in a world of one, before
        a further backward, and for other norms than 2. Of several bounds,
        `max_grad_norm` among them, the tightest holds.

        Args:
            max_norm: largest norm.
            norm_type: positive, or infinity.
            error_if_nonfinite: refuse a norm that is not finite; the host waits for it.
            foreach: as torch's; makes no difference here.

        Returns:
            The norm over all parameters and ranks before this call: an fp32 0-d tensor
                on the device, the same everywhere.

        Raises:
            ValueError: a norm of another order, or a negative bound.
            RuntimeError: the norm is not finite. Nothing was changed.
        """
        checks.check_bound("max_norm", max_norm)
        norm = self.get_total_norm(norm_type, error_if_nonfinite)
        self.coordinator.clip_norm(norm, max_norm, float(norm_type), self._loss_scale)
        return norm.float()

    @eager
    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clamp every element of the averaged gradients to [-clip_value, clip_value],
        as `torch.nn.utils.clip_grad_value_` does: a pass over this rank's shard. All
        ranks must call it; a negative bound is a ValueError."""
        checks.check_bound("clip_value", clip_value)
        coordinator = self._follow_edits()
        coordinator.refuse_in_backward("clip_grad_value_")
        coordinator.clip_value(clip_value, self._loss_scale)

    @eager
    @torch.no_grad()
    def get_total_norm(
        self, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Return the total norm of the averaged gradients, fp64, 0-d, the same on all
        ranks, and clip nothing. All ranks must call it. Arguments and errors are those
        of `clip_grad_norm_`."""
        checks.check_norm_type(norm_type)
        coordinator = self._follow_edits()
        coordinator.refuse_in_backward("clip_grad_norm_")
        norm = coordinator.total_norm(float(norm_type), self._loss_scale)
        if error_if_nonfinite:
            checks.check_finite(norm, norm_type)
        return norm

    @eager
    def unscale_(self, loss_scale: Tensor) -> Tensor:
        """Divide the coming step's gradients by a loss scale. `zerokern.GradScaler`
        calls this, on all ranks.

        Nothing is multiplied here: the factor is applied inside the update.

        Args:
            loss_scale: fp32, one element; not read by the host.

        Returns:
            1.0 if a gradient on any rank is not finite, else 0.0: fp32 [1] on the
                device, the same everywhere.
        """
        coordinator = self._follow_edits()
        coordinator.refuse_in_backward("a loss scale")
        with torch.no_grad():
            coordinator.synchronize()
            self._loss_scale = loss_scale
            return (~coordinator.updater.norm().isfinite()).float().reshape(1)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward accumulates locally and sends nothing."""
        return self.coordinator.reducer.no_sync()

    full_grad = observed(Observation.full_grad, collective=True)
    local_grad = observed(Observation.local_grad, collective=True)
    metrics = observed(Observation.metrics)
    memory = observed(Observation.memory)
    comm_log = observed(Observation.comm_log)
    grad_norm = property(observed(Observation.grad_norm))
    skipped_steps = property(observed(Observation.skipped_steps))

    @contextmanager
    def full_params(self) -> Iterator[None]:
        """Make every parameter whole, to read, save or edit the model. All ranks must
        enter it.

        Edits must be the same on all ranks; they are kept, and master weights follow.
        If the body raises, stage 3 drops them; stages 1 and 2 edit in place.
        """
        coordinator = self.coordinator
        if coordinator.sharding.parameters:
            coordinator.refuse_in_join("full_params()")
        with torch.no_grad(), coordinator.parameters.full():
            yield

    def join(self) -> AbstractContextManager[None]:
        """Return a context for loops, of training or evaluation, in which the ranks
        have different numbers of batches.

        A rank that has run out goes on taking part until all have, in every stage. The
        mean stays one over all ranks, as in torch's Join, and gradients are taken to be
        zeroed after each step. Each collective is announced by a small one, for which
        the host waits.

        Raises:
            RuntimeError: on all ranks, if those with batches are about to do different
                things.
            ValueError: updates are made in backward.
        """
        return self.coordinator.join()

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let a method other than forward, such as `encode`, use a module's parameters
        in stage 3: it is wrapped on this module object.

        Args:
            module: the model, or a module in it.
            name: of the method.

        Raises:
            ValueError: there is no such method.
        """
        self.coordinator.register_forward_method(module, name)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Ask torch.amp.GradScaler, which looks here first, to leave unscaling and
        skipping to `step`."""
        if not self.coordinator.transport.groups.alone:
            checks.refuse_scaler()
        return True
