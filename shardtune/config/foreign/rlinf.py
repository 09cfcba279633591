"""RLinf: most of its keys are the same here; these are others."""

from __future__ import annotations

from shardtune.config.foreign.table import By, Missing, NotNeeded, Table, each

NAME = "RLinf"
SECTIONS = ("cluster", "algorithm", "hydra")
"""Sections that its files have, and no recipe of ours."""
TABLE: Table = {
    "data.val_data_paths": By("data.eval_data_paths: FILE"),
    "data.prompt_key": By("data.columns: {question: NAME}"),
    "data.answer_key": By("data.columns: {answer: NAME}"),
    "data.image_keys": By("data.columns: {image: NAME}; several become a list images by data.transform"),
    "data.choice_key": Missing("data.transform: FILE.py:FUNCTION may write the choices into the question"),
    "data.max_prompt_length": Missing("data.max_length: N, of prompt and answer together"),
    "data.lazy_loading": NotNeeded("rows are encoded once, into a cache"),
    **each(
        "data.apply_chat_template data.use_chat_template",
        NotNeeded("the tokenizer's chat template is used, or data.chat_template"),
    ),
    "actor.optim.total_training_steps": NotNeeded("it follows from runner.max_epochs or runner.max_steps"),
    **each("cluster actor.group_name", NotNeeded("runner.nproc_per_node, or torchrun, starts the processes")),
    "hydra": NotNeeded("there is no Hydra here"),
    "defaults": Missing("the keys of the files that it names have to be in the recipe"),
    **each("algorithm reward critic", NotNeeded("it is not for supervised fine-tuning")),
    "runner.task_type": NotNeeded("training is supervised here"),
    "actor.fsdp_config.mixed_precision": By(
        "actor.model.precision: bf16, its param_dtype; weights and sums of gradients stay in fp32"
    ),
    "actor.fsdp_config.sharding_strategy": By(
        "actor.fsdp_config.reshard_after_forward: true (false for shard_grad_op and no_shard)"
    ),
    **each("actor.fsdp_config.strategy actor.fsdp_config.use_orig_params", NotNeeded("models are sharded with FSDP2")),
}
"""By the names in its files."""
