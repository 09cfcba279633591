"""The private names of torch that the package depends on, each with its reason and with what would replace it.

No other file uses a private name of torch (`tests/test_private_names.py` reads them all), so that a new release of
torch is checked against this folder alone. A name that a release lacks is an error of the first import of any of it.
"""

from importlib.metadata import requires

import torch

from shardtune.errors import ConfigError

try:
    from shardtune.parallel.torch_private import (  # noqa: F401
        fsdp1,
        fsdp2,
        graph,
        modules,
        operations,
        processes,
        recomputation,
        tensors,
    )
except ImportError as error:
    raise ConfigError(
        f"torch {torch.__version__} lacks a name that shardtune uses: {error}",
        where="torch",
        remedy="pip install '" + next(each for each in requires("shardtune") or () if each.startswith("torch")) + "'",
    ) from error
