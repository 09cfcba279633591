"""`python -m shardtune`, also under torchrun and accelerate launch."""

from shardtune.cli import main

main()
