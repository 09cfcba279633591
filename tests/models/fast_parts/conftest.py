"""Triton's kernels run in its interpreter here, which has to be said before Triton is imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
