"""Do two commits train the same bits? A fingerprint of every stage x recipe x
accumulation, to compare between commits.

    python -m bench.bits --out before.json          # on one commit
    python -m bench.bits --against before.json      # on the other, on the same machine

A case is a small transformer on random data: parameters, the whole optimizer state,
losses and norms are hashed on every rank, and so is the sequence of collectives
(operation, elements, dtype, bytes). Bits of matrix products depend on the processor, so
recordings of two machines say nothing. Exits 1 if a case differs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zerokern
from zerokern import Buckets, Precision

STEPS = 3
WIDTH, VOCABULARY, CONTEXT = 24, 61, 9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (zerokern.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "amsgrad": (zerokern.Adam, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "sgd": (zerokern.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "lion": (zerokern.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
}


@dataclass(frozen=True)
class Case:
    """One run."""

    stage: int
    rule: str = "adamw"
    dtype: str = "fp32"
    master: Any = "fp32"
    moments: Any = "fp32"
    wire: str | None = None
    gradients: str = "fp32"
    accumulation: str = "1"
    """Micro-batches of a step; "3" reduces each of them, "3 no_sync" the last one only,
    "vary" 1, 3, 2."""
    clip: float | None = None
    timing: str = "overlap"
    """"overlap", or an option of `Buckets` to set, or "none"."""

    def __str__(self) -> str:
        return " ".join(str(value) for value in vars(self).values())

    def precision(self) -> Precision:
        """Return the storage formats."""
        wire = None if self.wire is None else DTYPES[self.wire]
        return Precision(
            master=self.master,
            moments=self.moments,
            wire=wire,
            gradients=DTYPES[self.gradients],
            seed=7,
        )

    def buckets(self) -> Buckets:
        """Return sizes that make several buckets, and the timing."""
        timing = {} if self.timing in ("overlap", "none") else {self.timing: True}
        return Buckets(bytes=6_000, overlap=self.timing != "none", **timing)

    def micro_batches(self, step: int) -> int:
        """Return how many backwards a step has."""
        return (
            (1, 3, 2)[step]
            if self.accumulation == "vary"
            else int(self.accumulation[0])
        )


def cases() -> Iterator[Case]:
    """Yield every stage x recipe x accumulation; rules, clipping and timing with some
    of the recipes."""
    recipes = [{"moments": moments} for moments in ("fp32", "bf16", "8bit")]
    recipes += [
        {"dtype": "bf16", "master": master, "moments": moments}
        for master in ("fp32", "split32", "split24", "none")
        for moments in ("fp32", "bf16", "8bit")
    ]
    recipes += [
        {"dtype": "fp16"},
        {"dtype": "bf16", "wire": "fp32"},
        {"dtype": "bf16", "gradients": "bf16"},
        {"dtype": "fp32", "wire": "bf16"},
        {"dtype": "fp32", "wire": "bf16", "gradients": "bf16"},
    ]
    accumulations = ("1", "3", "3 no_sync", "vary")
    for stage, recipe, accumulation in itertools.product(
        (1, 2, 3), recipes, accumulations
    ):
        yield Case(stage, accumulation=accumulation, **recipe)  # type: ignore[arg-type]
    low = {"dtype": "bf16", "master": "split32", "moments": "bf16"}
    for stage, rule, recipe in itertools.product(
        (1, 2, 3), ("amsgrad", "sgd", "lion"), ({}, low)
    ):
        yield Case(stage, rule, **recipe)  # type: ignore[arg-type]
    for stage, accumulation, recipe in itertools.product(
        (1, 2, 3), accumulations, ({}, {"dtype": "bf16"})
    ):
        yield Case(stage, accumulation=accumulation, clip=0.1, **recipe)  # type: ignore[arg-type]
        for timing in ("none", "gather_in_forward"):
            yield Case(stage, accumulation=accumulation, timing=timing, **recipe)  # type: ignore[arg-type]
        if accumulation in ("1", "3 no_sync"):
            yield Case(
                stage, accumulation=accumulation, timing="update_in_backward", **recipe
            )  # type: ignore[arg-type]


class Block(nn.Module):
    """Attention and MLP, with sizes that no world divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 35), nn.Linear(35, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unsqueeze(1) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A language model of three blocks with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.T


def train(case: Case) -> tuple[str, str]:
    """Train a few steps; return fingerprints of everything that was computed, and of
    everything that was sent."""
    torch.manual_seed(1)
    model = Model().to(DTYPES[case.dtype])
    adam, options = RULES[case.rule]
    sharding: dict[str, Any] = {"model": model} if case.stage == 3 else {}
    optimizer = adam(
        model.parameters(),
        stage=case.stage,
        precision=case.precision(),
        buckets=case.buckets(),
        **sharding,
        **options,
    )
    seen: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro_batch in range(case.micro_batches(step)):
            last = micro_batch == case.micro_batches(step) - 1
            quiet = (
                case.accumulation.endswith("no_sync")
                or case.timing == "update_in_backward"
            ) and not last
            with optimizer.no_sync() if quiet else nullcontext():
                seen.append(_backward(model, 100 * step + micro_batch))
        if case.clip is not None:
            seen.append(optimizer.clip_grad_norm_(case.clip))
        optimizer.step()
        seen.append(optimizer.grad_norm.float())
    with optimizer.full_params():
        found = {
            name: param.detach().clone() for name, param in model.named_parameters()
        }
    for index, entry in optimizer.full_state_dict()["state"].items():
        found.update(
            {
                f"{index} {key}": value
                for key, value in entry.items()
                if isinstance(value, Tensor)
            }
        )
    found.update({f"seen {index}": value for index, value in enumerate(seen)})
    sent = [
        (call.op, call.elements, call.dtype, call.bytes)
        for call in optimizer.comm_log()
    ]
    return _hash_of_tensors(found), hashlib.sha256(repr(sent).encode()).hexdigest()[:16]


def _backward(model: Model, seed: int) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(10 * seed + rank)
    tokens = torch.randint(0, VOCABULARY, (2, CONTEXT + 1), generator=generator)
    logits = model(tokens[:, :-1]).float()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def _hash_of_tensors(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def record(world: int) -> dict[str, list[str]]:
    """Return the fingerprints of all cases on a world of this size: bits of every rank,
    then what rank 0 sent."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=_run, args=(rank, world, Path(folder)))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"a rank of a world of {world} failed; its error is above")
        answers = [
            json.loads((Path(folder) / str(rank)).read_text()) for rank in range(world)
        ]
    return {
        f"world {world} {case}": [
            *(answer[case][0] for answer in answers),
            answers[0][case][1],
        ]
        for case in answers[0]
    }


def _run(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group(
            "gloo",
            init_method=(folder / "rendezvous").as_uri(),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
    (folder / str(rank)).write_text(
        json.dumps({str(case): train(case) for case in cases()})
    )


def main() -> int:
    """Run as asked on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", default="1,2,3", help="sizes of the world")
    parser.add_argument("--out", type=Path, help="write the fingerprints")
    parser.add_argument(
        "--against", type=Path, help="compare with what another commit wrote"
    )
    options = parser.parse_args()
    found: dict[str, list[str]] = {}
    for world in map(int, options.world.split(",")):
        found.update(record(world))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.against is None:
        return 0
    other = json.loads(options.against.read_text())
    bits = [
        case for case in found if case in other and found[case][:-1] != other[case][:-1]
    ]
    traffic = [
        case for case in found if case in other and found[case][-1] != other[case][-1]
    ]
    missing = sorted(found.keys() ^ other.keys())
    for what, names in (
        ("other bits", bits),
        ("other collectives", traffic),
        ("only one side has", missing),
    ):
        for name in names:
            print(f"{what}: {name}")
    print(
        f"{len(found)} cases: {len(bits)} with other bits, {len(traffic)} with other"
        " collectives"
    )
    return int(bool(bits or traffic or missing))


if __name__ == "__main__":
    sys.exit(main())
