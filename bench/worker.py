"""One rank of one run: trains a model under one peer and measures it. Started by
`bench.compare` through torchrun.

Rank 0 writes the result, gathered over the ranks, to a file as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import model as models
from .peers import PEERS, Peer

WARMUP = 4
"""Steps before the measured ones: allocators, DDP's bucket order."""


def main() -> None:
    """Run as asked on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", required=True)
    parser.add_argument("--size", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rows", type=int, default=2, help="sequences per rank")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument(
        "--reference",
        type=Path,
        required=True,
        help="the baseline's final parameters; written by it",
    )
    parser.add_argument("--write-reference", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = run(options)
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train and return what was measured."""
    _load_libraries()
    base = _status("VmRSS")
    model = models.build(options.size)
    numel = sum(p.numel() for p in model.parameters())
    initial = (
        {name: p.detach().clone() for name, p in model.named_parameters()}
        if dist.get_rank() == 0
        else {}
    )
    kept = sum(t.nbytes for t in initial.values())
    peer = PEERS[options.peer](model, options.dtype)
    _reset_peak()
    batches = [
        models.batch(options.size, step, dist.get_rank(), options.rows)
        for step in range(WARMUP + options.steps)
    ]
    losses, times = [], []
    sent = 0
    for step, (tokens, targets) in enumerate(batches):
        if step == WARMUP:
            dist.barrier()
            sent = _sent_on_loopback()
        dist.barrier()
        loss, seconds = _step(peer, tokens, targets)
        losses.append(loss)
        times.append(seconds)
    dist.barrier()
    sent = _sent_on_loopback() - sent
    mine = {
        "times": times[WARMUP:],
        "losses": losses,
        "state_bytes": _live_bytes() - kept,
        "rss_bytes": _status("VmHWM") - base - kept,
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    logged = peer.logged_bytes()
    final = {name: value.cpu() for name, value in peer.full_params().items()}
    if dist.get_rank() != 0:
        return {}
    alone = os.environ.get("BENCH_OWN_NETWORK") == "1"
    return {
        **summary(ranks),
        "numel": numel,
        "wire_bytes": sent / options.steps / len(ranks) if alone else None,
        "ideal_bytes": peer.ideal_bytes(numel, len(ranks)),
        "logged_bytes": logged,
        **_distance(options, initial, final),
    }


def _step(
    peer: Peer, tokens: Tensor, targets: Tensor
) -> tuple[float, dict[str, float]]:
    """Return the loss and seconds of one step: wall time in parts, CPU time of all
    threads."""
    cpu, start = time.process_time(), time.perf_counter()
    peer.zero_grad()
    with peer.context():
        loss = peer.module(tokens, targets)
    forward = time.perf_counter()
    peer.backward(loss)
    backward = time.perf_counter()
    peer.step()
    end = time.perf_counter()
    parts = {
        "forward": forward - start,
        "backward": backward - forward,
        "optimizer": end - backward,
    }
    return loss.item(), {"step": end - start, "cpu": time.process_time() - cpu, **parts}


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Reduce over ranks (the slowest of each step; the mean of CPU time), then over
    steps (median, minimum)."""
    row: dict[str, Any] = {}
    steps = range(len(ranks[0]["times"]))
    for part in ("step", "forward", "backward", "optimizer", "cpu"):
        reduce = statistics.fmean if part == "cpu" else max
        values = [reduce(rank["times"][step][part] for rank in ranks) for step in steps]
        row[f"{part}_ms"] = 1e3 * statistics.median(values)
        row[f"{part}_min_ms"] = 1e3 * min(values)
    row["state_bytes"] = max(rank["state_bytes"] for rank in ranks)
    row["rss_bytes"] = max(rank["rss_bytes"] for rank in ranks)
    row["losses"] = [
        statistics.fmean(column)
        for column in zip(*(rank["losses"] for rank in ranks), strict=True)
    ]
    return row


def _distance(
    options: argparse.Namespace, initial: dict[str, Tensor], final: dict[str, Tensor]
) -> dict[str, float]:
    """Compare the final parameters with the baseline's, relative to how far these
    moved; or save them."""
    if options.write_reference:
        torch.save(final, options.reference)
    if not options.reference.exists():
        return {}
    reference = torch.load(options.reference)
    apart = sum(
        float((final[name] - value).double().square().sum())
        for name, value in reference.items()
    )
    moved = sum(
        float((value - initial[name]).double().square().sum())
        for name, value in reference.items()
    )
    return {"distance": (apart / moved) ** 0.5}


def _load_libraries() -> None:
    """Take one step of anything, so that what torch loads lazily for every peer does
    not count as any one's memory."""
    layer = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(64, 256)).sum().backward()
    optimizer.step()


def _live_bytes() -> int:
    """Return the bytes of distinct storages that live tensors of this process have,
    gradients included.

    Python must know the tensor: buffers inside DDP's C++ reducer are not seen here,
    only in the resident set.
    """
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type == "meta":
            continue
        storage = local.untyped_storage()
        if storage.nbytes() and storage.resizable():  # else it borrows another's memory
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _reset_peak() -> None:
    """Set VmHWM to the resident set of now. Where the kernel refuses, the peak of the
    set-up is included."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _sent_on_loopback() -> int:
    """Return the bytes that were sent on `lo` in this network namespace: by all ranks,
    TCP headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    return 0


if __name__ == "__main__":
    main()
