"""One parameter's place in a bucket of gradients: which parts of its gradient are
where, and what was left in p.grad."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ..holders import is_held
from .gradient_states import HAS_LOCAL, HAS_REDUCED, OURS, Seen, SlotState
from .handles import ParamHandle
from .parameters import gradient_dtype
from .placeholders import ReducedGradient


class GradientSlot:
    """The gradient of one parameter in one bucket.

    p.grad tells whether the user still wants it. What is left there is a placeholder,
    or in a world of one the view of the bucket.
    """

    def __init__(self, handle: ParamHandle) -> None:
        self.handle = handle
        self.param = handle.param
        self.state = SlotState.EMPTY
        dtype = gradient_dtype(handle.param)
        self.placeholder = ReducedGradient.of(handle.param, handle.name, dtype)
        self.seen = Seen.GONE
        """The result of the last look at p.grad."""
        self.view: Tensor | None = None
        """Its part of the bucket, while the bucket has memory."""
        self.waiting: Tensor | None = None
        """A local gradient that is still to be packed into the bucket."""
        self.is_undefined = False
        """Autograd comes by without a gradient: p.grad stays as it is."""
        self._left: Tensor | None = None
        """The tensor that was left in p.grad, and its version at that time."""
        self._version = 0
        self._arrived = 0
        self._expected = 1
        """Gradients of this backward pass, and the most that any pass has brought: a
        parameter in two reentrant checkpoints has two."""

    # ---------------------------------------------------------------- p.grad

    def look(self) -> Seen:
        """Look at p.grad. Done once at each entry point; what follows goes by
        `seen`."""
        grad = self.param.grad
        if grad is None:
            self.seen = Seen.GONE
        elif grad is not self._left:
            self.seen = Seen.REPLACED
        elif grad._version == self._version:
            self.seen = Seen.KEPT
        else:
            self.seen = Seen.WRITTEN
        return self.seen

    def attach(self, view: Tensor) -> None:
        """The bucket has memory; `view` is this parameter's part of it."""
        self.view = view

    def pack(self) -> None:
        """The gradient that waited was copied into the bucket, by us."""
        self.waiting = None
        self.accept_writes()

    def clear(self) -> None:
        """Set p.grad to None."""
        self.param.grad = None
        self.seen = Seen.GONE

    def accept_writes(self) -> None:
        """Take what is in p.grad as if it had been left there now."""
        if self._left is not None and self.seen in OURS:
            self._version = self._left._version
            self.seen = Seen.KEPT

    def is_held(self) -> bool:
        """p.grad was dropped: return whether somebody has kept the view that was left
        there."""
        ours = 2 + (self._left is self.view)  # with the argument of getrefcount
        return self.view is not None and sys.getrefcount(self.view) > ours

    @property
    def shows_placeholder(self) -> bool:
        """Whether p.grad was the placeholder when it was last looked at."""
        return self.seen in OURS and self._left is self.placeholder

    # ---------------------------------------------------------------- transitions

    def arrive(self, waiting: Tensor | None, *, show: bool) -> bool:
        """A gradient of this rank has come into the bucket, or waits to be packed.

        Args:
            waiting: the gradient, if it waits.
            show: leave the view of the bucket in p.grad, not the placeholder.

        Returns:
            Whether it is the last one that this pass is expected to bring.
        """
        reduced = self.state in HAS_REDUCED
        self.state = SlotState.BOTH if reduced else SlotState.LOCAL
        self.waiting = waiting
        left = self.view if show and self.view is not None else self.placeholder
        self.param.grad = self._left = left
        self._version = left._version
        self.seen = Seen.KEPT
        self._arrived += 1
        return self._arrived == self._expected

    def expect_none(self) -> None:
        """Autograd comes by without a gradient."""
        self.is_undefined = True

    def pass_by(self) -> bool:
        """Autograd has come by without a gradient. Return whether it does so for the
        last time in this pass."""
        self.is_undefined = False
        self._arrived += 1
        return self._arrived == self._expected

    def zero(self) -> None:
        """p.grad was zeroed in place: this rank's gradient is one of zero."""
        assert self.view is not None
        self.view.zero_()
        self.waiting = None
        self.state = SlotState.LOCAL

    def drop_local(self) -> None:
        """Drop what the bucket has."""
        reduced = self.state in HAS_REDUCED
        self.state = SlotState.REDUCED if reduced else SlotState.EMPTY
        self.waiting = None

    def drop_reduced(self) -> None:
        """Drop what the shard has."""
        local = self.state in HAS_LOCAL
        self.state = SlotState.LOCAL if local else SlotState.EMPTY

    def reduce(self, *, keeps_view: bool) -> None:
        """The bucket was reduced into the shard; its memory is gone, or stale."""
        if self.state is not SlotState.EMPTY:
            self.state = SlotState.REDUCED
        if not keeps_view:
            self.view = None

    def reduce_alone(self) -> None:
        """World of one: the shard has what the bucket has, and the bucket keeps it."""
        local = self.state in HAS_LOCAL
        self.state = SlotState.BOTH if local else SlotState.EMPTY

    def forget(self) -> None:
        """Neither has anything that is wanted, nor memory."""
        self.state = SlotState.EMPTY
        self.waiting = self.view = None

    def end_backward(self) -> None:
        """Remember how many gradients a pass brings, and start counting anew."""
        self._expected = max(self._arrived, self._expected)
        self._arrived = 0

    # ---------------------------------------------------------------- refusals

    def refuse_sparse(self) -> None:
        """Refuse a gradient that is sparse.

        Raises:
            TypeError: always; names the parameter and the remedy.
        """
        raise TypeError(
            f"the gradient of {self.handle.name!r} is sparse; zerokern reduces dense"
            " gradients only: build the embedding with sparse=False"
        )

    def refuse_dropped(self) -> None:
        """Refuse to drop a gradient that was used in backward.

        Raises:
            RuntimeError: always; names the parameter and the remedy.
        """
        raise RuntimeError(
            f"gradients were zeroed before step(), and {self.handle.name!r} was updated"
            " by them already: Buckets(update_in_backward=True) updates in every"
            " backward outside of no_sync(). Freeze the parameters or leave"
            " update_in_backward out where a backward is not for this optimizer, such"
            " as a generator's through its discriminator"
        )

    def refuse_late(self) -> None:
        """Refuse a gradient that comes after the update in backward.

        Raises:
            RuntimeError: always; names the parameter and the remedy.
        """
        raise RuntimeError(
            f"a gradient of {self.handle.name!r} arrived after its update: with"
            " update_in_backward the last backward before step() updates; run those"
            " before it inside optimizer.no_sync()"
        )

    def refuse_unseen(self) -> None:
        """The parameter is a placeholder, and yet a gradient comes: of a forward that
        ran before the last step, or that has read it behind our back. Refuse that.

        Raises:
            RuntimeError: names the parameter and the remedy.
        """
        if not is_held([self.param], torch.jit.ScriptModule):
            return
        raise RuntimeError(
            f"{self.handle.name!r} was read before it was gathered, by code that shows"
            " torch none of its reads, such as TorchScript: leave"
            " Buckets(gather_in_forward=True) out"
        )
