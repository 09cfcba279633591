"""The dtypes of a run, by the names of its precision."""

from __future__ import annotations

import torch

SUM_DTYPE = {**dict.fromkeys(("bf16", "pure_bf16", "fp16", "fp32"), torch.float32), "fp64": torch.float64}
"""By precision: of gradients, summed over micro-batches and ranks, and of the arithmetic of updates."""
MASTER_DTYPE = {**SUM_DTYPE, "pure_bf16": torch.bfloat16}
"""Of weights between steps."""
COMPUTE_DTYPE = {**MASTER_DTYPE, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Of forward and backward passes."""
IN_FULL = {**dict.fromkeys(("bf16", "pure_bf16", "fp16", "fp32"), "fp32"), "fp64": "fp64"}
"""The precision whose forward and backward passes compute in that dtype of sums."""
