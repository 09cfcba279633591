"""`python -m shardtune`, also under torchrun and accelerate launch."""

from shardtune.cli.commands import main

main()
