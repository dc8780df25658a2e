"""The job: train a small GPT on real text with plain AdamW, then with ZeRO-1, 2 and 3,
and compare.

    python -m zerokern.examples.train                          # starts its ranks itself
    torchrun --nproc-per-node 2 -m zerokern.examples.train     # is one of torchrun's

Every run starts from the same seed and sees the same global batch; in a sharded run
each rank takes its part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .options import Options, parse
from .progress import progress_for
from .report import Report
from .trainer import PROMPT, Trainer

COINCIDE = {"fp32": 1e-3, "coarse": 2e-1}
"""Loss differences, in nats, that rounding explains: ranks and one process add the same
numbers in another order.

torch's AdamW alone, fed a batch whole or as two halves, differs by 2e-6 over 400 steps
in fp32, by 1e-1 over 40 in bf16.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job. Return 0, or 2 after one plain sentence if it cannot run as
    asked."""
    options = parse(arguments)
    try:
        if dist.is_torchelastic_launched():
            run_rank(options)
        else:
            options.check(options.ranks, options.ranks)
            start_ranks(options)
    except ValueError as error:
        print(f"zerokern: {error}", file=sys.stderr)
        return 2
    return 0


def start_ranks(options: Options) -> None:
    """Start the ranks on this machine as torchrun would, and wait for them."""
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.ranks,
        run_id="zerokern",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    elastic_launch(launch, run_rank)(options)


def run_rank(options: Options) -> None:
    """Be one rank: join the others and compare the runs."""
    # As torchrun would; threads of several ranks would spin on each other's cores.
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if options.on_gpu else "gloo")
    try:
        options.check(dist.get_world_size(), dist.get_node_local_rank() + 1)
        compare(options)
    finally:
        dist.destroy_process_group()


def compare(options: Options) -> None:
    """Make the runs one after the other; on rank 0, print and write what they found."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    device = torch.device("cpu")
    if options.on_gpu:
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    text = options.read_text()
    if rank == 0:
        where = torch.cuda.get_device_name(device) if options.on_gpu else "CPU, gloo"
        print(
            f"{len(text.training):,} bytes of text to learn from,"
            f" {len(text.validation):,} to validate; {world} ranks ({where}),"
            f" {options.dtype}, {options.steps} steps of {options.batch} x"
            f" {text.context} bytes",
            flush=True,
        )
    runs = []
    sample = b""
    with progress_for(rank) as progress:
        for stage in (0, *options.stages):
            if stage or rank == 0:
                trainer = Trainer(options, text, device, stage=stage)
                runs.append(trainer.run(progress))
                sample = trainer.sample()
            dist.barrier()
    if rank == 0:
        setting: dict[str, str | int | float] = {
            "world": world,
            "device": where,
            "dtype": options.dtype,
            "parameters": trainer.numel,
        }
        setting |= {
            "steps": options.steps,
            "batch": options.batch,
            "context": text.context,
            "torch": torch.__version__,
        }
        conclude(options, Report(setting=setting, runs=runs), sample)


def conclude(options: Options, report: Report, sample: bytes) -> None:
    """Print the table, whether the curves coincide, and the sample; write the files."""
    print(
        f"\n{report.setting['parameters']:,} parameters; sizes are measured"
        f" (theory):\n\n{report.markdown()}"
    )
    if options.stages:
        difference = report.largest_difference()
        limit = COINCIDE[
            "fp32" if options.dtype == options.moments == "fp32" else "coarse"
        ]
        verdict = "coincide" if difference <= limit else "DO NOT COINCIDE"
        print(f"The {len(report.runs)} loss curves {verdict}: ", end="")
        print(
            f"the largest difference is {difference:.1e} nats, the limit {limit:.0e}.\n"
        )
    print(f"The {report.runs[-1].name} model, given {PROMPT.decode()!r}, writes:\n")
    print(
        "\n".join(
            "    " + line for line in sample.decode(errors="replace").splitlines()
        )
    )
    print("\nWritten: " + ", ".join(str(path) for path in report.write(options.out)))


if __name__ == "__main__":
    sys.exit(main())
