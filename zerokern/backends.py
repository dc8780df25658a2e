"""Which implementation of the kernels runs: Triton, native code, or plain torch."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from . import config, pretend
from .kernels import native, reference


def check_backend(tensor: Tensor) -> None:
    """Refuse a back end that cannot run on this tensor's device, before anything
    depends on it.

    Raises:
        ValueError: "triton" on a CPU outside of the interpreter, "native" on a GPU, or
            an unknown name.
    """
    implementation(tensor, "ZEROKERN_BACKEND")


def implementation(
    tensor: Tensor, name: str, backend: config.Backend | None = None
) -> ModuleType:
    """Return the module whose functions will run: a Triton kernel's launcher or the
    reference."""
    if pretend.is_fake(tensor):
        return pretend
    choice = backend or config.backend()
    if choice == "auto":
        choice = "triton" if tensor.is_cuda else "native"
    if choice == "native":
        if tensor.is_cuda:
            raise ValueError(
                f"{name}: backend 'native' was given a tensor on {tensor.device}; it"
                " runs on the CPU: use 'triton'"
            )
        compiled = name in ("update", "reduce", "scalars") and native.available()
        return native if compiled else reference
    if choice == "torch":
        return reference
    # Importing Triton takes a second: only where it is used.
    from .kernels import cast, launch, pack, reduce, scalars, update

    if not tensor.is_cuda and not launch.INTERPRETED:
        raise ValueError(
            f"{name}: backend 'triton' was given a tensor on {tensor.device}; Triton"
            " runs on GPUs: use backend 'torch', or set TRITON_INTERPRET=1 before"
            " Python starts, for Triton's interpreter"
        )
    modules: dict[str, ModuleType] = {
        "cast": cast,
        "pack": pack,
        "reduce": reduce,
        "scalars": scalars,
        "update": update,
    }
    return modules.get(name, launch)
