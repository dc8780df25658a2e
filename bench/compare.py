"""Train the same GPT under zerokern and under other systems, side by side.

    python -m bench.compare --size 10m,30m --world 2,4 --dtype fp32,bf16 \\
        --out bench/results/compare.jsonl
    python -m bench.compare --table bench/results/compare.jsonl --write bench/README.md

Runs are interleaved (A B C, A B C, ...) and ratios are taken inside a round, so that a
busy neighbour meets them all. Each run is a process group of its own, one thread per
rank, and where `unshare -n` is allowed in a network namespace of its own: the bytes
counted on `lo` are then that run's alone. How each number is measured:
`bench/worker.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from . import machine, tables
from .peers import BASELINE, PEERS, why_not

TIMEOUT_S = 300


def main(arguments: list[str] | None = None) -> int:
    """Run as asked on the command line; 1 if a peer failed."""
    options = _parse(arguments)
    if options.table:
        text = tables.render(row for path in options.table for row in tables.read(path))
        print(text)
        if options.write:
            tables.write_into(options.write, text)
        return 0
    unknown = [peer for peer in options.peers if peer not in PEERS]
    if unknown:
        print(
            f"unknown peers: {', '.join(unknown)}; known are {', '.join(PEERS)}",
            file=sys.stderr,
        )
        return 2
    peers = [BASELINE, *(peer for peer in options.peers if peer != BASELINE)]
    rows: list[dict[str, Any]] = []
    for size, world, dtype in itertools.product(
        options.size, map(int, options.world), options.dtype
    ):
        for row in compare(peers, size, world, dtype, options.rounds, options.steps):
            rows.append(row)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(tables.render(rows))
    return int(any("error" in row for row in rows))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    def listed(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size",
        type=listed,
        default=["10m", "30m"],
        help="of the model: tiny, 10m, 30m",
    )
    parser.add_argument("--world", type=listed, default=["2", "4"], help="ranks")
    parser.add_argument("--dtype", type=listed, default=["fp32", "bf16"])
    known = f"of {', '.join(PEERS)}; {BASELINE} always runs"
    parser.add_argument("--peers", type=listed, default=list(PEERS), help=known)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="measured steps per run, after 4 of warm-up",
    )
    parser.add_argument("--out", type=Path, help="append one JSON row per run")
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        help="run nothing: print the tables of these files",
    )
    parser.add_argument(
        "--write",
        type=Path,
        help="with --table: put them between the markers of this document",
    )
    return parser.parse_args(arguments)


def compare(
    peers: list[str], size: str, world: int, dtype: str, rounds: int, steps: int
) -> Any:
    """Yield one row per run. A peer that failed is not tried again."""
    about = {
        **machine.describe(),
        "size": size,
        "world": world,
        "dtype": dtype,
        "steps": steps,
    }
    alive = list(peers)
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for peer in list(alive):
                start = time.monotonic()
                first = ["--write-reference"] if peer == BASELINE and turn == 0 else []
                reason = why_not(peer, dtype)
                if reason:
                    result = {"skipped": reason}
                else:
                    result = launch(
                        peer, size, world, dtype, steps, Path(folder), *first
                    )
                if "step_ms" not in result:
                    alive.remove(peer)
                _tell(
                    f"{size} {dtype} {world} ranks, round {turn + 1}, {peer}",
                    result,
                    time.monotonic() - start,
                )
                yield {**about, "peer": peer, "round": turn, **result}


def _tell(what: str, result: dict[str, Any], seconds: float) -> None:
    outcome = (
        result.get("skipped")
        or result.get("error")
        or f"{result['step_ms']:.0f} ms per step"
    )
    print(f"{what}: {outcome} ({seconds:.0f} s)", file=sys.stderr, flush=True)


def launch(
    peer: str, size: str, world: int, dtype: str, steps: int, folder: Path, *more: str
) -> dict[str, Any]:
    """Run one process group to its end and return what its rank 0 wrote, or an
    error."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = _worker(peer, size, world, dtype, steps)
    command += ["--result", str(result)]
    command += ["--reference", str(folder / "reference.pt"), *more]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if _may_unshare():
        environment["BENCH_OWN_NETWORK"] = "1"
        alone = 'ip link set lo up && exec "$@"'
        command = ["unshare", "--net", "sh", "-c", alone, "sh", *command]
    with tempfile.TemporaryFile("w+") as log:
        code = _run(command, environment, log)
        if result.exists():
            answer: dict[str, Any] = json.loads(result.read_text())
            return answer
        log.seek(0)
        return {"error": _error(log.read(), code)}


def _worker(peer: str, size: str, world: int, dtype: str, steps: int) -> list[str]:
    """Return the command that starts a process group."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={world}",
        "-m",
        "bench.worker",
        "--peer",
        peer,
        "--size",
        size,
        "--dtype",
        dtype,
        "--steps",
        str(steps),
    ]


def _run(command: list[str], environment: dict[str, str], log: IO[str]) -> int:
    """Run a command, but not for longer than TIMEOUT_S; return its exit code."""
    process = subprocess.Popen(
        command,
        cwd=machine.ROOT,
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TIMEOUT_S)
    finally:  # also when we are interrupted ourselves
        if process.poll() is None:
            # The session we have just started: torchrun ends its ranks.
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    return process.returncode


def _error(log: str, code: int) -> str:
    """Return the first error of a log, or that there was none."""
    for line in log.splitlines():
        if "Error" in line and "ChildFailed" not in line:
            return line[-300:]
    return f"no result within {TIMEOUT_S} s, exit code {code}"


def _may_unshare() -> bool:
    try:
        probe = subprocess.run(
            ["unshare", "--net", "ip", "link", "set", "lo", "up"],
            capture_output=True,
            check=False,
        )
    except OSError:
        return False
    return probe.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
