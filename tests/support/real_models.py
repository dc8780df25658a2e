"""Architectures of public libraries, tiny and randomly initialised, and the data that
they train on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Nothing here is downloaded, and nothing is looked up.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.models.resnet.modeling_resnet import ResNetBasicLayer
from transformers.models.t5.modeling_t5 import T5Block

transformers.logging.set_verbosity_error()

VOCABULARY, LENGTH, ROWS = 64, 10, 4
EXPERTS = 8
LAYERS = 4
"""Enough that the root, a unit in use and one ahead are less than the whole."""

Batch = dict[str, Tensor]


# --------------------------------------------------------------- causal language models


SMOOTH = "gelu"
"""Instead of relu: an input of relu that is zero but for rounding has a gradient on one
side of zero and none on the other, so that two runs whose sums differ in their last
bits part, on some CPUs and not on others."""


def gpt2() -> nn.Module:
    """Tied embeddings, learnt positions, biases everywhere."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=LAYERS,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


_LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def llama() -> nn.Module:
    """Tied embeddings, rotary positions, grouped queries, no biases."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **_LLAMA, intermediate_size=48, tie_word_embeddings=True
        )
    )


def mixtral() -> nn.Module:
    """Experts as slices of one weight, and a loss that balances them."""
    config = transformers.MixtralConfig(
        **_LLAMA,
        intermediate_size=24,
        num_local_experts=EXPERTS,
        num_experts_per_tok=1,
        output_router_logits=True,
    )
    return transformers.MixtralForCausalLM._from_config(
        config, experts_implementation="eager"
    )


def qwen2_moe() -> nn.Module:
    """Experts beside one that every token passes."""
    config = transformers.Qwen2MoeConfig(
        **_LLAMA,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    return transformers.Qwen2MoeForCausalLM._from_config(
        config, experts_implementation="eager"
    )


def switch() -> nn.Module:
    """Experts as modules: those that no token of any rank chose have no gradient in
    that step."""
    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=EXPERTS,
        router_jitter_noise=0.0,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        dense_act_fn=SMOOTH,
    )
    return transformers.SwitchTransformersForConditionalGeneration(config)


def t5() -> nn.Module:
    """One embedding for encoder, decoder and head; the encoder's output enters every
    block of the decoder."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=LAYERS,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        feed_forward_proj=f"gated-{SMOOTH}",
    )
    return transformers.T5ForConditionalGeneration(config)


def t5_block(module: nn.Module) -> bool:
    """Return whether a module of T5 is gathered as one."""
    return isinstance(module, T5Block)


def checkpointed(
    build: Callable[[], nn.Module], *, reentrant: bool
) -> Callable[[], nn.Module]:
    """Return a function that builds the model with its layers recomputed in
    backward."""

    def with_checkpoints() -> nn.Module:
        model: Any = build()
        with old_names():
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": reentrant}
            )
        return model

    return with_checkpoints


def lora(build: Callable[[], nn.Module] = gpt2) -> nn.Module:
    """Adapters of rank 1 on the attention of a model of which 99 % are frozen."""
    config = LoraConfig(
        r=1,
        lora_alpha=2,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        lora_dropout=0.0,
    )
    with old_names():
        return get_peft_model(build(), config)


@contextmanager
def old_names() -> Iterator[None]:
    """Leave out the warning of transformers 5.24 that PEFT, and we for the sake of
    Python 3.10, use old names."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning
        )
        yield


def tokens(generator: torch.Generator) -> Batch:
    """Return rows in which each token follows from the one before, with some noise."""
    start = torch.randint(3, VOCABULARY, (ROWS, 1), generator=generator)
    noise = torch.randint(0, 3, (ROWS, LENGTH), generator=generator)
    rows = 3 + (start + 7 * torch.arange(LENGTH) + noise) % (VOCABULARY - 3)
    return {"input_ids": rows, "labels": rows}


# ---------------------------------------------------------------------- images


def vit() -> nn.Module:
    """Patches, a class token, layers."""
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


def resnet_layer(module: nn.Module) -> bool:
    """Return whether a module of the ResNet is gathered as one: less than the stages,
    which are in a ModuleList."""
    return isinstance(module, ResNetBasicLayer)


def resnet() -> nn.Module:
    """Convolutions with BatchNorm in stages of layers."""
    config = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 12, 16],
        depths=[2, 2, 2],
        layer_type="basic",
        num_labels=4,
        hidden_act=SMOOTH,
    )
    return transformers.ResNetForImageClassification(config)


def images(generator: torch.Generator) -> Batch:
    """Return noise whose mean tells the class."""
    labels = torch.randint(0, 4, (2 * ROWS,), generator=generator)
    pixels = (
        torch.randn(2 * ROWS, 3, 32, 32, generator=generator)
        + labels[:, None, None, None]
    )
    return {"pixel_values": pixels, "labels": labels}


def noisy_images(generator: torch.Generator) -> Batch:
    """Return stripes with noise, and the noise."""
    noise = torch.randn(ROWS, 3, 8, 8, generator=generator)
    time = torch.rand(ROWS, 1, generator=generator)
    stripes = torch.sin(torch.arange(8.0)).expand(ROWS, 3, 8, 8)
    weight = time[:, :, None, None]
    return {
        "noisy": (1 - weight) * stripes + weight * noise,
        "time": time,
        "noise": noise,
    }
