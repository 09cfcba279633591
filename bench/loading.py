"""Peak anonymous memory while ranks load a checkpoint of 1 GB in fp32: `python bench/loading.py`.

Rewrites the section `loading` of docs/benchmarks.md; ends with exit code 1 where a limit does not hold.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from results import machine, table, write_section  # noqa: E402

from tests.support.dist.loading import LAYOUTS, checkpoint_bytes, peaks, save_checkpoint  # noqa: E402

GIGABYTE = 1e9
LIMIT = 0.65
"""Gigabytes above what the rank had before, for a checkpoint of 1 GB on two ranks."""


def main() -> int:
    lines, kept = [], True
    with tempfile.TemporaryDirectory() as folder:
        model = save_checkpoint(Path(folder), layers=16, width=1152)
        size = checkpoint_bytes(model) / GIGABYTE
        for name, ranks, keys in LAYOUTS:
            found = [peak / GIGABYTE for peak in peaks(model, ranks, keys)]
            kept &= ranks != 2 or max(found) <= LIMIT * size
            lines.append((name, ranks, f"{size / ranks:.2f}", f"{max(found):.2f}", f"{max(found) / size:.2f}"))
            print(*lines[-1], flush=True)
    text = (
        f"A checkpoint of {size:.2f} GB in fp32, one file. Anonymous memory of a rank (sampled every 2 ms) at its "
        "peak, above what it had before the model was built; the largest of all ranks. "
        f"Limit on two ranks: {LIMIT:g} of the checkpoint.\n\n"
    )
    text += table(("layout", "ranks", "a rank's share, GB", "peak above the baseline, GB", "of the checkpoint"), lines)
    write_section("loading", f"{text}\n\n{'Within the limit' if kept else 'ABOVE THE LIMIT'}. {machine()}.")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
