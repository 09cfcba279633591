"""A window of torch's profiler over some optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

FOLDER = "profile"


class ProfileWindow:
    """Records the steps of `runner.profile_steps` and writes one trace per rank, for chrome://tracing or Perfetto.

    Args:
        steps: the first and the last optimizer step to record, counted from 1; empty: none.
        folder: where the trace goes.
        rank: names the trace.
    """

    def __init__(self, steps: Sequence[int], folder: Path, rank: int) -> None:
        self._first, self._last = (steps[0], steps[-1]) if steps else (0, -1)
        self._folder = folder
        self._rank = rank
        self._from = 0
        self._to = 0
        self._profile: profile | None = None

    def outside(self, done: int, last: int) -> str | None:
        """What to say of a run that has none of the steps to record; None where it has some.

        Args:
            done: the steps that are done when it begins.
            last: its last step.
        """
        if self._first <= last and self._last > done:
            return None
        steps = f"its steps are {done + 1:,} to {last:,}" if done + 1 < last else f"its only step is {last:,}"
        here = steps if done < last else "it has no more steps"
        return (
            f"runner.profile_steps: [{self._first}, {self._last}] are no steps of this run ({here}): no trace is made"
        )

    def before(self, step: int) -> None:
        """Call before optimizer step `step`."""
        if self._profile is None and self._first <= step <= self._last:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._from, self._profile = step, profile(activities=activities, record_shapes=True)
            self._profile.start()
        self._to = step

    def after(self, step: int) -> Path | None:
        """Call after optimizer step `step`; returns the trace once it is written."""
        return self.close() if step >= self._last else None

    def close(self) -> Path | None:
        """End the recording, also in the middle of the window; returns the trace, None if nothing was recorded."""
        if self._profile is None:
            return None
        recorded, self._profile = self._profile, None
        recorded.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"steps_{self._from}-{self._to}_rank_{self._rank}.json"
        recorded.export_chrome_trace(str(file))
        return file
