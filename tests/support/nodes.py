"""Two nodes on one machine: network namespaces with a slow link between them, and a
core for each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from zerokern.plan.calibration import JOBS, Job, here, measure_here

PORT = 29571
ADDRESSES = ("10.73.0.1", "10.73.0.2")
OTHERS = [
    Job(3, 320, 96, 1),
    Job(3, 320, 96, 3),
    Job(8, 448, 64, 1),
    Job(8, 448, 64, 3),
]
"""Models and batches that are not among JOBS."""
TIMEOUT_S = 1500
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "link0"}
"""Of every rank."""


def missing() -> str:
    """Return what this machine lacks for two nodes, or nothing."""
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools or os.geteuid() != 0:
        lacking = ", ".join(tools) or "root"
        return f"network namespaces need root and iproute2 (missing: {lacking})"
    return "" if len(os.sched_getaffinity(0)) >= 2 else "two nodes need two cores"


@contextmanager
def linked(rate: str) -> Iterator[Sequence[str]]:
    """Yield the names of two namespaces that reach each other at a rate such as
    500mbit, in each direction."""
    first, second = (f"zerokern-{os.getpid()}-{side}" for side in "ab")
    with ExitStack() as stack:
        for name in (first, second):
            run(f"ip netns add {name}")
            stack.callback(run, f"ip netns delete {name}")
        run(f"ip -n {first} link add link0 type veth peer name link0 netns {second}")
        shape = f"tbf rate {rate} burst 128kb latency 100ms"
        for name, address in zip((first, second), ADDRESSES, strict=True):
            run(f"ip -n {name} address add {address}/24 dev link0")
            run(f"ip -n {name} link set lo up")
            run(f"ip -n {name} link set link0 up")
            run(f"tc -n {name} qdisc add dev link0 root {shape}")
        yield first, second


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def launch(names: Sequence[str], ranks: int, script: Sequence[str]) -> None:
    """Run a script under torchrun with so many ranks in each namespace, each namespace
    on a core of its own."""
    nodes = []
    cores = sorted(os.sched_getaffinity(0))
    try:
        for index, (name, core) in enumerate(zip(names, cores, strict=False)):
            torchrun = (
                f"-m torch.distributed.run --nnodes={len(names)} --node-rank={index}"
                f" --nproc-per-node={ranks}"
                f" --master-addr={ADDRESSES[0]} --master-port={PORT}"
            )
            enter = f"ip netns exec {name}"
            nodes.append(
                subprocess.Popen(
                    [*enter.split(), sys.executable, *torchrun.split(), *script],
                    env={**os.environ, **ENVIRONMENT},
                    preexec_fn=partial(os.sched_setaffinity, 0, {core}),
                )
            )
        for node in nodes:
            assert node.wait(TIMEOUT_S) == 0
    finally:
        for node in nodes:
            node.terminate()
            node.wait()


def measure(
    folder: Path, rate: str, rounds: int
) -> tuple[Path, Mapping[int, list[float]]]:
    """Return a machine's file as it is before calibration, and step times of JOBS and
    OTHERS on 2, 3 and 4 ranks."""
    with linked(rate) as names:
        launch(names, 2, [__file__, str(folder), str(rounds)])
    times = json.loads((folder / "times.json").read_text())
    return folder / "machine.json", {
        int(world): seconds for world, seconds in times.items()
    }


def main(folder: Path, rounds: int) -> None:
    """Be a rank of `measure`."""
    rank, machine = int(os.environ["RANK"]), here()
    times = measure_here((2, 3, 4), JOBS + OTHERS, rounds)
    if rank == 0:
        machine.save(folder / "machine.json")
        (folder / "times.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
