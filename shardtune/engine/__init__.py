"""A user's own module on all ranks, whose methods are called as if it were one."""
