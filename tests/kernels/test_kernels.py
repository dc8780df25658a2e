"""What holds for every kernel: no value is compiled into it, and it draws no numbers
from torch."""

from __future__ import annotations

from typing import Any

import kernel_shards
import pytest
import torch
from backends import ALL_BACKENDS, DEVICE, assert_same_bits, device_of, placed, run_both
from kernel_shards import columns_of, mixed_shard, shard_of
from samples import seeded
from scalar_tables import ADAMW, VARIANTS, run_scalars, scalar_inputs, scalars_of

from zerokern import ops
from zerokern.kernels import cast, pack, reduce, scalars, update
from zerokern.ops import BLOCK


@pytest.mark.parametrize(
    "kernel",
    [
        update.update_kernel,
        reduce.reduce_kernel,
        scalars.scalars_kernel,
        pack.pack_kernel,
        cast.cast_kernel,
    ],
)
def test_no_value_is_compiled_into_a_kernel(kernel: Any) -> None:
    """Triton compiles anew for integers that are 1, or multiples of 16, unless told not
    to."""
    if hasattr(kernel, "kwargs"):
        told = kernel.kwargs["do_not_specialize"]
    else:
        told = kernel.do_not_specialize
    runtime = {name for name in kernel.arg_names if name.islower()}
    values = {name for name in runtime if not name.endswith("_ptr")}
    # A float is never specialised.
    assert values - {"scale"} == set(told)


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICE != "cuda",
    reason="the interpreter compiles nothing; test_cards.py reads the specialisations",
)
def test_values_do_not_recompile() -> None:
    """By what lies in the kernels' caches."""
    kernels = (update.update_kernel, reduce.reduce_kernel, scalars.scalars_kernel)
    counts = []
    for blocks, num_columns, step in (
        (16, 2, 0),
        (1, 1, 1),
        (17, 16, 16),
        (15, 3, 17),
        (1024, 17, 2**24),
    ):
        state = mixed_shard(ADAMW, "fp32", "fp32", blocks * BLOCK)
        grad = seeded(blocks * BLOCK)
        columns = columns_of([0] * blocks)
        lr = 1.0 if step == 1 else 1e-3
        options = scalars_of(ADAMW, num_columns, step, lr=lr)
        run_both(ops.update_, state, grad, columns=columns, **options)

        partials = torch.zeros(ops.partials_numel(blocks * BLOCK), dtype=torch.float64)
        for world in (1, 2):
            tensors = (grad, grad, grad.view(1, -1)[: world - 1], partials)
            run_both(ops.reduce_, *tensors, rank=0, scale=1 / world)
        run_scalars(scalar_inputs(num_columns, step))
        device = torch.cuda.current_device()
        counts.append([len(kernel.device_caches[device][0]) for kernel in kernels])
    assert all(count == counts[0] for count in counts)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_no_operation_draws_from_torch(backend: Any) -> None:
    """Rounding at random must not change what a training run draws, nor be changed by
    it."""
    device = device_of(backend)
    chosen = VARIANTS["amsgrad"]
    options = scalars_of(chosen)
    columns = columns_of([0])
    before = torch.get_rng_state()
    state = shard_of(chosen, "split24", "8bit", seeded(BLOCK), backend=backend)
    kernel_shards.update(state, seeded(BLOCK), columns, backend, **options)

    grad = seeded(BLOCK).to(device)
    nothing = grad[None, :][:0]
    partials = torch.zeros(1, dtype=torch.float64, device=device)
    ops.reduce_(
        grad,
        grad,
        nothing,
        partials,
        rank=0,
        scale=1.0,
        backend=backend,
    )
    ops.cast_(state.param, grad, backend=backend)
    ops.pack_(
        [state.param],
        [grad],
        0.5,
        backend=backend,
    )
    inputs = {name: placed(value, device) for name, value in scalar_inputs(1).items()}
    ops.scalars_(**inputs, backend=backend)
    assert torch.equal(torch.get_rng_state(), before)

    # The same seed, the same bits, whatever was drawn meanwhile.
    again = shard_of(chosen, "split24", "8bit", seeded(BLOCK), backend=backend)
    torch.rand(7)
    kernel_shards.update(again, seeded(BLOCK), columns, backend, **options)
    assert again.first is not None and state.first is not None
    assert_same_bits(again.first.values, state.first.values.cpu())
