"""Is it the same training? zerokern's stages beside DDP + torch.optim.AdamW: same
model, same data, 20 steps, 2 ranks.

    python -m bench.accuracy [--size tiny] [--world 2] [--steps 20]

Exits 1 unless losses agree to 1e-5 and parameters to 2e-4 of the whole update: torch's
own fused and foreach AdamW differ by 8e-5, since they round in another order.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from . import worker
from .compare import launch
from .peers import BASELINE, PEERS

LOSS, UPDATE = 1e-5, 2e-4


def main() -> int:
    """Run as asked on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    counted = max(options.steps - worker.WARMUP, 1)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        settings = (options.size, options.world, "fp32", counted, Path(folder))
        baseline = launch(BASELINE, *settings, "--write-reference")
        print(
            f"{BASELINE}: loss {baseline['losses'][0]:.6f} ->"
            f" {baseline['losses'][-1]:.6f}"
        )
        for peer in (name for name in PEERS if name.startswith("zerokern")):
            row = launch(peer, *settings)
            if "error" in row:
                print(f"{peer}: {row['error']}")
                failed += 1
                continue
            loss = max(
                abs(x - y)
                for x, y in zip(row["losses"], baseline["losses"], strict=True)
            )
            passed = loss <= LOSS and row["distance"] <= UPDATE
            failed += not passed
            print(
                f"{peer}: {'passed' if passed else 'FAILED'}, largest loss difference"
                f" {loss:.1e} (at most {LOSS:.0e}), difference of the update"
                f" {row['distance']:.1e} (at most {UPDATE:.0e})"
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
