"""The workload to plan for: a model, and the loss of one batch of it. Built on fakes,
so that its size does not matter."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from .decoder import Decoder, width_for

Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model that can be built, and what a rank feeds it."""

    title: str
    build: Callable[[], tuple[nn.Module, Loss | None]]
    """Return the model and the loss of a batch; None if nobody knows what the model
    takes."""
    tokens: int
    """Tokens (of a language model) or samples in a rank's batch."""
    per: str = "tokens"
    """The unit of `tokens`."""


def find(
    model: str,
    *,
    batch: int,
    sequence: int,
    dtype: torch.dtype,
) -> Workload:
    """Return the workload that a word of the command line names.

    Args:
        model: "package.module:name" of a module class, or of a function without
            arguments that returns a module, or a module and a function from it to the
            loss of a batch; or a Hugging Face configuration, a JSON file or the folder
            that has it.
        batch: samples of a rank's batch.
        sequence: tokens of a sample.
        dtype: what the parameters are cast to.

    Raises:
        ValueError: nothing can be built of it; says why and what to give instead.
    """
    if Path(model).exists():
        return _of_config(Path(model), batch, sequence, dtype)
    if ":" in model:
        return _of_import(model, batch, dtype)
    raise ValueError(
        f"{model!r} is neither a file nor an import path; give package.module:factory,"
        " a Hugging Face config.json, or --params and --layers"
    )


def of_count(
    params: int, layers: int, *, batch: int, sequence: int, dtype: torch.dtype
) -> Workload:
    """Return a decoder-only language model of about so many parameters.

    Args:
        params: how many.
        layers: blocks.
        batch, sequence, dtype: as for `find`.
    """
    width = width_for(params, layers)

    def build() -> tuple[nn.Module, Loss]:
        model = Decoder(layers, width).to(dtype)
        text = torch.zeros(batch, sequence + 1, dtype=torch.int64)
        return model, lambda model: model.loss(text)

    title = f"a decoder of {layers} layers, {width} wide"
    return Workload(title=title, build=build, tokens=batch * sequence)


def _of_import(path: str, batch: int, dtype: torch.dtype) -> Workload:
    module_name, _, name = path.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{path!r} cannot be imported ({error}); give package.module:name as Python"
            " finds it"
        ) from error
    finally:
        sys.path.pop(0)
    if not callable(factory):
        raise ValueError(
            f"{path!r} is a {type(factory).__name__}; give a module class or a function"
            " that returns one"
        )
    needed = [
        p.name
        for p in inspect.signature(factory).parameters.values()
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if needed:
        raise ValueError(
            f"{path!r} needs arguments ({', '.join(needed)}); give a function without"
            " any, which returns the model"
        )

    def build() -> tuple[nn.Module, Loss | None]:
        try:
            built = factory()
        except Exception as error:
            if "Uninitialized" in str(error):
                raise _lazy("a parameter", path) from error
            raise ValueError(
                f"{path!r} cannot be built without data or files"
                f" ({type(error).__name__}: {error}); give a function that builds the"
                " architecture only, with sizes written in it"
            ) from error
        model, loss = built if isinstance(built, tuple) else (built, None)
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"{path!r} returned a {type(model).__name__}; it must return a"
                " torch.nn.Module, or one and a function from it to the loss of a"
                " batch"
            )
        _check_built(path, model)
        return model.to(dtype), loss

    return Workload(title=path, build=build, tokens=batch, per="samples")


def _check_built(path: str, model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if isinstance(param, UninitializedParameter):
            raise _lazy(repr(name), path)


def _lazy(param: str, path: str) -> ValueError:
    return ValueError(
        f"{param} of {path!r} gets its shape from the first batch (a lazy module);"
        " build it with its sizes, or run a batch through it in the function that"
        " returns it"
    )


def _of_config(
    path: Path,
    batch: int,
    sequence: int,
    dtype: torch.dtype,
) -> Workload:
    try:
        import transformers
    except ImportError:
        raise ValueError(
            f"{path} is a Hugging Face configuration, and transformers is not"
            " installed; pip install 'zerokern[models]'"
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} is no configuration that transformers knows: {error}"
        ) from error
    image = hasattr(config, "image_size") and not hasattr(config, "vocab_size")

    def build() -> tuple[nn.Module, Loss]:
        model = _model_of(transformers, config).to(dtype)
        if image:
            side = (
                config.image_size
                if isinstance(config.image_size, int)
                else config.image_size[0]
            )
            given: dict[str, Any] = {
                "pixel_values": torch.zeros(
                    batch, config.num_channels, side, side, dtype=dtype
                ),
                "labels": torch.zeros(batch, dtype=torch.int64),
            }
        else:
            text = torch.zeros(batch, sequence, dtype=torch.int64)
            given = {"input_ids": text, "labels": text}
            if hasattr(config, "use_cache"):
                given["use_cache"] = False
        model.train()
        return model, lambda model: model(**given).loss

    tokens = batch if image else batch * sequence
    return Workload(
        title=path.name,
        build=build,
        tokens=tokens,
        per="samples" if image else "tokens",
    )


def _model_of(transformers: Any, config: Any) -> nn.Module:
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)(config)  # type: ignore[no-any-return]
    for auto in (
        "AutoModelForCausalLM",
        "AutoModelForSeq2SeqLM",
        "AutoModelForImageClassification",
    ):
        chosen = getattr(transformers, auto)
        if type(config) in chosen._model_mapping:
            return chosen.from_config(config)  # type: ignore[no-any-return]
    raise ValueError(
        f"a {type(config).__name__} names no architecture that has a loss; give"
        " package.module:function, which returns the model and a function from it to"
        " the loss of a batch"
    )
