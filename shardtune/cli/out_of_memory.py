"""The message when memory runs out."""

from __future__ import annotations

REMEDIES = (
    "lower actor.micro_batch_size or actor.max_tokens_per_micro_batch (the numbers stay the same)",
    "set model.gradient_checkpointing=true",
    "lower data.max_length",
    "use more ranks (runner.nproc_per_node): weights, gradients and optimizer state are divided among them",
)


def explain_out_of_memory(error: BaseException) -> str | None:
    """A message with remedies for an out-of-memory error; None for any other."""
    if not _is_out_of_memory(error):
        return None
    lines = [f"out of memory: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"]
    return "\n".join([*lines, *(f"  remedy: {remedy}" for remedy in REMEDIES)])


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in ("can't allocate memory", "not enough memory", "CUDA out of memory")
    )
