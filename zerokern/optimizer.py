"""Adam, AdamW and SGD as torch.optim has them, and Lion, with optimizer state,
gradients or parameters sharded over the ranks. Each adds its update rule and nothing
else."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from . import rules
from .options import Options
from .sharded_optimizer import ShardedOptimizer

if sys.version_info >= (3, 11):
    from typing import Unpack
else:
    from typing_extensions import Unpack


class Adam(ShardedOptimizer):
    """Adam (Kingma and Ba, arXiv:1412.6980) with ZeRO sharding (Rajbhandari et al.,
    arXiv:1910.02054).

    Replaces `torch.optim.Adam`, argument for argument::

        optimizer = Adam(model.parameters(), lr=1e-3, stage=2)

    Gradients are averaged over the ranks here: do not wrap the model in
    DistributedDataParallel. Without a process group, the world has one rank and the
    result is that of torch.

    Args:
        params: parameters, param groups, or (name, parameter) pairs. All on one device;
            fp32, bf16 or fp16. 16-bit parameters get fp32 master weights, unless
            `precision` says otherwise.
        lr: learning rate; a number or a 0-d tensor, read at every step.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: L2 coefficient, or decoupled decay (AdamW).
        amsgrad: divide by the root of the largest second moment so far. Not with 8-bit
            moments.
        maximize: ascend instead of descend.
        foreach, fused, capturable: accepted for compatibility; the update is always
            fused and never synchronises.
        differentiable: not available: True is refused.
        decoupled_weight_decay: decay the parameter and not its gradient.
        options: stage, model, process_group and the rest of `zerokern.Options`.

    Raises:
        ValueError: a bad option or parameter; on all ranks, if these disagree about the
            model.
        TypeError: a parameter of a dtype that the kernels do not know.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, rules.adam, **options)


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with ZeRO sharding. Replaces
    `torch.optim.AdamW`.

    Example::

        optimizer = AdamW(model.parameters(), lr=3e-4, stage=3, model=model)

    Arguments are those of `Adam`; weight decay is decoupled.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            **options,
        )


class SGD(ShardedOptimizer):
    """Stochastic gradient descent with ZeRO sharding. Replaces `torch.optim.SGD`.

    Args:
        params: as for `Adam`.
        lr: learning rate; a number or a 0-d tensor, read at every step.
        momentum: of the buffer; with 0 in every group there is no buffer, and no
            optimizer state.
        dampening: the part of a gradient that the momentum does not take.
        weight_decay: L2 coefficient.
        nesterov: look ahead by one momentum.
        maximize, foreach, differentiable, fused: as for `Adam`.
        options: as for `Adam`.

    Raises:
        ValueError, TypeError: as for `Adam`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float | Tensor = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, rules.sgd, **options)


class Lion(ShardedOptimizer):
    """Lion (Chen et al., arXiv:2302.06675) with ZeRO sharding: one moment, steps of one
    size.

    Its usual learning rate is a third to a tenth of AdamW's, its weight decay larger by
    the same factor.

    Args:
        params: as for `Adam`.
        lr: the size of a step; a number or a 0-d tensor, read at every step.
        betas: of the interpolation whose sign is the step, and of the moment.
        weight_decay: decoupled decay.
        maximize: ascend instead of descend.
        options: as for `Adam`.

    Raises:
        ValueError, TypeError: as for `Adam`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "weight_decay": weight_decay,
                "maximize": maximize,
            },
            rules.lion,
            **options,
        )
