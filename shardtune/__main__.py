"""`python -m shardtune`, also under torchrun and accelerate launch."""

from shardtune.launch.module_process import leave_out_working_directory

leave_out_working_directory()  # before torch and others are imported

from shardtune.cli import main  # noqa: E402

main()
