"""What papers print about memory and communication, as functions: to check their
tables, and to compare with.

These are formulas about an ideal system. What zerokern takes is what a rehearsal says.
"""

from __future__ import annotations

from typing import NamedTuple

ADAM_STATE = 12
"""K of the ZeRO paper: bytes per parameter of fp32 master weights and two fp32
moments."""


def zero_bytes(params: float, world: int, stage: int) -> float:
    """Return the bytes of model state per device, with fp16 parameters and gradients.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (SC 2020), section 5, figure 1 and table 1.

    Args:
        params: of the model.
        world: data-parallel ranks.
        stage: 0 for none, 1 optimizer states, 2 and gradients, 3 and parameters.

    Raises:
        ValueError: another stage.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage}: it must be 0, 1, 2 or 3")
    over = [world if stage >= part else 1 for part in (1, 2, 3)]
    return params * (ADAM_STATE / over[0] + 2 / over[1] + 2 / over[2])


class Volume(NamedTuple):
    """Elements' worth of fp16 parameters that a step sends between nodes, per
    collective."""

    forward_gather: float
    backward_gather: float
    reduce_scatter: float

    @property
    def total(self) -> float:
        """The sum."""
        return sum(self)


def zero_plus_plus_volume(
    params: float = 1.0,
    *,
    quantized_weights: bool = False,
    hierarchical: bool = False,
    quantized_gradients: bool = False,
) -> Volume:
    """Return the volume between nodes of ZeRO-3, and with ZeRO++'s three changes to it.

    Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
    Training" (2023), table 1.

    Args:
        params: M, the size of the model.
        quantized_weights: qwZ, gathers in int8.
        hierarchical: hpZ, backward gathers within a node.
        quantized_gradients: qgZ, reductions in int4.
    """
    gather = params * (0.5 if quantized_weights else 1.0)
    return Volume(
        gather,
        0.0 if hierarchical else gather,
        params * (0.25 if quantized_gradients else 1.0),
    )


def stage_3_over_data_parallel(
    *, gradient_itemsize: int = 2, parameter_itemsize: int = 2
) -> float:
    """Return the bytes that ZeRO-3 sends over those of data parallelism, which sends
    every gradient twice.

    ZeRO paper, section 7: 3 against 2 in elements, hence 1.5. Bytes depend on the
    formats: with gradients reduced in fp32 and parameters gathered in bf16 it is (2 x 2
    + 4) / (2 + 4) = 1.33.
    """
    return (2 * parameter_itemsize + gradient_itemsize) / (
        parameter_itemsize + gradient_itemsize
    )
