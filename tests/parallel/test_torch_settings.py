"""torch's settings are as before once they are set back."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import torch
from shardtune.run.caller_settings import recipe_settings

torch.backends.fp32_precision = "tf32"
with recipe_settings():
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
torch.backends.fp32_precision = "ieee"
print(torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
"""


def test_the_precision_of_all_products_reaches_each_after_it_was_set_back() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["ieee", "ieee"], "")
