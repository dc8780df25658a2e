"""One bucket's gradients, from autograd to the reduced shard."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import ops
from ..transport import Reduce, Transport
from .gradient_states import HAS_LOCAL, HAS_REDUCED, OURS, BucketState, Seen, SlotState
from .parameters import ParameterBucket, gradient_dtype
from .slots import GradientSlot


class GradientBucket:
    """The gradients of one bucket on one rank."""

    def __init__(
        self,
        parameters: ParameterBucket,
        transport: Transport,
        partials: Tensor,
        *,
        index: int,
        wire: torch.dtype,
        reduced: torch.dtype,
        resident: bool,
        update_in_backward: bool,
    ) -> None:
        """Set up storage.

        Args:
            parameters: whose gradients these are.
            transport: the optimizer's.
            partials: fp64, gets the sums of squares of this bucket's shard.
            index: among the trainable buckets.
            wire, reduced: dtypes of `local` and of `shard`.
            resident: `local` lives forever; if the dtypes are one, the shard is this
                rank's part of it.
            update_in_backward: the shard lives from its reduction to its update only.
        """
        self.parameters = parameters
        self.layout = parameters.layout
        self.index = index
        self.is_resident = resident
        self.updates_in_backward = update_in_backward
        self.slots = [GradientSlot(handle) for handle in parameters.handles]
        self.state = BucketState.LOCAL
        self.is_final = False
        """The reduction under way is the last one before the update."""
        self.generation = 0
        """Grows when a gradient comes, goes or is written to."""
        self.is_complete = False
        """Every parameter has brought as many gradients as it ever has."""
        self.is_ready = False
        """It may be launched before backward ends."""
        self.transfer = Reduce(transport, self.layout, parameters.name, partials)
        self.local: Tensor | None = None
        """[W * S], this rank's gradients."""
        self.accumulated: Tensor | None = None
        """[S], a reduced gradient that nobody zeroed: the next reduction adds to it."""
        self.packs_at_once = transport.device.type == "cuda"
        """In one launch. On a CPU each is packed while it is in the cache."""
        self._transport = transport
        self._partials = partials
        self._wire = wire
        self._reduced = reduced
        # Of several ranks none has the gradient, and a part must not pass for it.
        self._alone = transport.groups.alone and not update_in_backward
        dtypes = {gradient_dtype(param) for param in parameters.params}
        self._shows = self._alone and dtypes == {wire}
        self._missing = len(self.slots)  # parameters that are not complete
        self._counted = False  # whether a gradient came at all
        self._waiting: list[GradientSlot] = []
        """Those whose gradients are still to be packed."""
        self._alone_generation = -1
        if resident:
            self._open()
        self.shard = self._empty_shard(transport)
        """[S], the reduced gradient."""
        self._references = self._count_references()
        """To the memory of `local`, of our own."""

    def sum_squares_into(self, partials: Tensor) -> None:
        """Leave sums of squares elsewhere from now on; those so far are there."""
        self._partials = partials
        title = self.transfer.title
        self.transfer = Reduce(self._transport, self.layout, title, partials)

    @property
    def has_reduced(self) -> bool:
        """Of what was reduced, this rank had a part."""
        return any(slot.state in HAS_REDUCED for slot in self.slots)

    def _empty_shard(self, transport: Transport) -> Tensor:
        if self.local is not None and self._wire == self._reduced:
            return self.local[self.layout.shard(transport.groups.averages.rank)]
        numel = 0 if self.updates_in_backward else self.layout.shard_numel
        return torch.zeros(numel, dtype=self._reduced, device=transport.device)

    # ---------------------------------------------------------------- one gradient

    def prepare(self, slot: GradientSlot) -> None:
        """LOCAL: prepare for autograd's accumulation into p.grad."""
        slot.look()
        if self._waiting and slot.seen in OURS and slot.state in HAS_LOCAL:
            self.pack()  # what autograd adds to must be there
        if slot.seen is not Seen.KEPT and slot.state is not SlotState.EMPTY:
            self._follow(slot)
        if slot.seen in OURS and slot.shows_placeholder:
            slot.clear()  # autograd would add in place to a tensor without memory

    def take(self, slot: GradientSlot) -> None:
        """LOCAL: take the gradient that autograd, or the user, left in p.grad."""
        grad = slot.param.grad
        waiting = None
        if grad is None or slot.is_undefined:
            self._counted = True
            self._missing -= slot.pass_by()
            self.is_complete = self._missing == 0
            return
        if self.local is None:
            self._open()
        view = slot.view
        assert view is not None
        if grad is not view:
            if slot.state in HAS_LOCAL and slot.seen is Seen.GONE:
                view.add_(grad)  # p.grad was a placeholder of what is in the bucket
            elif self.packs_at_once:
                waiting = grad
                self._waiting.append(slot)
            else:
                view.copy_(grad)
        self._counted = True
        self._missing -= slot.arrive(waiting, show=self._shows)
        self.is_complete = self._missing == 0
        self.generation += 1

    def set_ready(self, ready: bool) -> None:
        """Say whether the bucket may be launched before backward ends."""
        self.is_ready = ready

    def pack(self) -> None:
        """Copy gradients that wait into the bucket, in one launch."""
        waiting = [slot for slot in self._waiting if slot.waiting is not None]
        self._waiting.clear()
        if waiting:
            ops.pack_([s.view for s in waiting], [s.waiting for s in waiting])  # type: ignore[misc]
            for slot in waiting:
                slot.pack()

    def end_backward(self) -> None:
        """Pack what is left, and start counting gradients anew."""
        if self._waiting:
            self.pack()
        if self._counted:
            for slot in self.slots:
                slot.end_backward()
        self._missing = len(self.slots)
        self._counted = False
        self.is_complete = self.is_ready = False

    def _follow(self, slot: GradientSlot) -> None:
        """Follow what somebody has done to p.grad since something was left there."""
        was_wanted = slot.state is not SlotState.EMPTY
        had_reduced = slot.state in HAS_REDUCED
        slot.drop_reduced()
        if had_reduced and self.accumulated is not None:
            self.parameters.zero_slots(self.accumulated, [slot.handle.slot])
            if not self.has_reduced:
                self.drop_accumulated()  # with what other ranks have contributed
        if slot.seen not in OURS:
            slot.drop_local()
        elif slot.shows_placeholder and was_wanted:
            if self.local is None:
                self._open()
            slot.zero()
        slot.accept_writes()
        self.generation += was_wanted

    # ---------------------------------------------------------------- all of them

    def reopen(self, *, accumulate: bool) -> None:
        """REDUCED or ZEROED: make the bucket LOCAL again. What was reduced, and not
        zeroed since, is added to by the next reduction.

        Args:
            accumulate: so is what others have contributed where this rank has nothing.
        """
        if self.state is BucketState.REDUCED:
            for slot in self.slots:
                slot.look()
            others = accumulate and not self.has_reduced
            if self.forget_zeroed(reopening=True) or others:
                in_local = self.is_resident and self._wire == self._reduced
                self.accumulated = self.shard.clone() if in_local else self.shard
        if self.updates_in_backward and self.accumulated is None:
            self._give_shard()
        self.state = BucketState.LOCAL

    def launch(self, *, is_final: bool) -> None:
        """LOCAL: start the reduction, which an update follows if it `is_final`.
        Parameters without a gradient contribute zeros, so no rank waits for another."""
        if self._waiting:
            self.pack()
        local = self._open() if self.local is None else self.local
        for slot in self.slots:
            if slot.look() is not Seen.KEPT and slot.state is not SlotState.EMPTY:
                self._follow(slot)
            if slot.state not in HAS_LOCAL:
                slot.view.zero_()  # type: ignore[union-attr]
        if self.updates_in_backward:
            self.shard = self._transport.take(self.layout.shard_numel, self._reduced)
        self.transfer.start(local, self.shard, self.accumulated)
        self.state = BucketState.REDUCING
        self.is_final = is_final

    def finish(self) -> None:
        """REDUCING: have the sum when the current stream gets here."""
        if self.state is not BucketState.REDUCING:
            return
        self.transfer.finish()
        if self.accumulated is not None:
            self.drop_accumulated()
        if not self.is_resident and self.local is not None:
            self._transport.give(self.local)
            self.local = None
        for slot in self.slots:
            slot.reduce(keeps_view=self.is_resident)
        self.state = BucketState.REDUCED
        self.generation += 1

    def reduce_alone(self) -> None:
        """World of one: the local gradient is the reduced one."""
        # A captured step runs again, on other gradients.
        captured = self.shard.is_cuda and torch.cuda.is_current_stream_capturing()
        if not captured and self.generation == self._alone_generation:
            return
        if self._waiting:
            self.pack()
        for slot in self.slots:
            slot.reduce_alone()
            if slot.state not in HAS_LOCAL and slot.view is not None:
                slot.view.zero_()
        if self.local is None or all(s.state not in HAS_LOCAL for s in self.slots):
            self._partials.zero_()
        else:
            self.transfer.alone(self.local, self.shard)
        self._alone_generation = self.generation

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """REDUCED, or alone: change the gradients by a function that works in place."""
        if self._alone:
            if self.local is not None:
                function(self.local)
                self.parameters.zero_padding(self.local)
        elif self.state is BucketState.REDUCED:
            function(self.shard)
            self.parameters.zero_padding(self.shard, of_shard=True)
            self.transfer.sum_squares(self.shard)
        self.generation += 1

    def follow_all(self) -> None:
        """World of one: follow what was done to every p.grad, as it was seen."""
        for slot in self.slots:
            if slot.seen is not Seen.KEPT:
                self._follow(slot)

    # ---------------------------------------------------------------- zeroing

    def forget_zeroed(self, *, reopening: bool = False) -> bool:
        """REDUCED: drop gradients that were zeroed. Return whether any is kept."""
        kept = False
        dropped = []
        for slot in self.slots:
            if slot.state not in HAS_REDUCED:
                continue
            shows = slot.shows_placeholder
            if shows and slot.seen is Seen.KEPT:
                kept = True
                continue
            dropped.append(slot.handle.slot)
            if not shows:
                slot.drop_reduced()
            slot.accept_writes()
        if dropped and (kept or not reopening):
            self.parameters.zero_slots(self.shard, dropped)
            self.transfer.sum_squares(self.shard)
            self.generation += 1
        return kept

    def clear_zeroed(self) -> None:
        """ZEROED: nothing came since, so the shard has to be zero."""
        self.shard.zero_()
        self.transfer.sum_squares(self.shard)
        self.state = BucketState.REDUCED
        self.generation += 1

    def drop_zeroed(self) -> None:
        """All gradients were zeroed: forget what was reduced, of other ranks too."""
        self.finish()
        self.is_final = False
        wanted = False
        if self.state is BucketState.UPDATED:
            self.slots[0].refuse_dropped()
        for slot in self.slots:
            wanted |= slot.look() is not Seen.GONE
        if self._shows and not wanted:
            self._leave_to_holders()
        if self.accumulated is not None:
            self.follow_all()
            self.drop_accumulated()
        if self.state is BucketState.REDUCED:
            self.state = BucketState.ZEROED
        if self.state is BucketState.ZEROED:
            for slot in self.slots:
                if not slot.shows_placeholder:
                    slot.drop_reduced()
                slot.accept_writes()
        elif not self.is_resident and not wanted:
            if self.local is not None:
                self._transport.give(self.local)
                self.local = None
            for slot in self.slots:
                slot.forget()
        self.generation += 1

    def drop_accumulated(self) -> None:
        """Forget what was to be added to."""
        forgotten, self.accumulated = self.accumulated, None
        if forgotten is not None and self.updates_in_backward:
            self._transport.give(forgotten)

    # --------------------------------------------------------------- update_in_backward

    def release(self) -> None:
        """The gradients were used, or are not wanted any more. Their memory goes."""
        self.finish()
        if self.state not in (BucketState.REDUCED, BucketState.ZEROED):
            return
        for slot in self.slots:
            slot.look()
            if slot.shows_placeholder:
                slot.clear()
            slot.forget()
        self._give_shard()
        self.state = BucketState.UPDATED

    def abandon(self) -> None:
        """A backward ended in an exception: no update will be made of this."""
        self.finish()
        self.drop_accumulated()
        self.release()
        self.end_step()

    def end_step(self) -> None:
        """Gradients may come again."""
        self.is_final = False
        if self.state is BucketState.UPDATED:
            self.state = BucketState.LOCAL

    def _give_shard(self) -> None:
        self._transport.give(self.shard)
        self.shard = self.shard.new_empty(0)

    # ---------------------------------------------------------------- memory

    def _leave_to_holders(self) -> None:
        """World of one: p.grad was dropped. What somebody has kept of it stays as it
        is: new gradients get new memory."""
        held = self._count_references() > self._references
        if not held and not any(slot.is_held() for slot in self.slots):
            return
        for slot in self.slots:
            slot.forget()
        self._open()
        self.shard = self._empty_shard(self._transport)
        self._references = self._count_references()

    def _count_references(self) -> int:
        if self.local is None or not self._shows:
            return 0
        return torch._C._storage_Use_Count(self.local.untyped_storage()._cdata)

    def _open(self) -> Tensor:
        """Give `local` memory."""
        numel = self.layout.numel
        device = self._transport.device
        if self.is_resident:
            self.local = torch.zeros(numel, dtype=self._wire, device=device)
        else:
            self.local = self._transport.take(numel, self._wire)
        for slot, place in zip(self.slots, self.parameters.places, strict=True):
            # .data: each view has a version counter of its own.
            slot.attach(self.local.as_strided(*place).data)
        for start, end in self.layout.padding:
            self.local[start:end].zero_()  # it takes part in sums
        return self.local
