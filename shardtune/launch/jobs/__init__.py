"""The commands and files that start a recipe on a cluster, as text to copy: torchrun, Slurm, Ray, containers."""
