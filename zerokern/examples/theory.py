"""The bytes that a rank holds and sends under ZeRO, from the paper's formulas.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models" (2020), sections 5 and 7.
Letters: P parameters, W ranks. Stage 0 is plain data parallelism; one process alone is
         W = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerokern import Precision
from zerokern.ops import MASTERS, MOMENTS

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of model state that one rank holds between the backward pass and the
    step."""

    parameters: float
    """The weights that the model computes with."""

    gradients: float
    """Gradients, and the fp32 shard that they are summed into if they are 16 bits
    wide."""

    master: float
    """Bytes that complete 16-bit weights to 24 or 32 bits; none for an fp32 model."""

    moments: float
    """Adam's two moments."""

    @property
    def total(self) -> float:
        """The sum of the four."""
        return self.parameters + self.gradients + self.master + self.moments


def state_bytes(
    numel: int, *, world: int, stage: int, itemsize: int, precision: Precision
) -> StateBytes:
    """Return the model state of a rank.

    Args:
        numel: P, parameters of the model.
        world: W, ranks.
        stage: 0 for plain data parallelism, or ZeRO's 1 (moments and master sharded), 2
            (and gradients), 3 (and parameters).
        itemsize: bytes of a parameter: 4 for fp32, 2 for bf16.
        precision: formats of master weights and moments.
    """
    fp32 = FP32_BYTES * numel
    own = numel * itemsize
    mixed = itemsize < FP32_BYTES
    states_over = world if stage >= 1 else 1
    form = MASTERS[precision.master] if mixed else None
    master = 0 if form is None else form.bytes
    summed = fp32 / states_over if mixed else 0
    gradients = fp32 / world if stage >= 2 else own + summed
    return StateBytes(
        parameters=own / (world if stage == 3 else 1),
        gradients=gradients,
        master=master * numel / states_over,
        moments=2 * MOMENTS[precision.moments].bytes * numel / states_over,
    )


def sent_bytes(
    numel: int,
    *,
    world: int,
    stage: int,
    itemsize: int,
) -> float:
    """Return the bytes that a rank sends per step: 2P elements in stages 1 and 2, 3P in
    stage 3, times (W - 1)/W.

    Stages 1 and 2 reduce-scatter the gradients and all-gather the updated parameters.
    Stage 3 gathers the parameters once more, for the backward pass.
    """
    passes = 3 if stage == 3 else 2
    return passes * numel * itemsize * (world - 1) / world
