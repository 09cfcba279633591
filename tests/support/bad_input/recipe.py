"""Mistakes in the recipe: keys, types, sizes, contradictions, and features to come."""

from __future__ import annotations

from tests.support.bad_input.case import Case, chat, in_recipe, with_keys, write
from tests.support.workspace import rows, write_rows

KEYS: list[Case] = [
    in_recipe(
        "unknown section",
        "runner:",
        "optimizer: {}\nrunner:",
        says="unknown key optimizer | recipe.yaml:1 | actor.optim",
    ),
    in_recipe(
        "unknown key of runner",
        "max_steps: 2",
        "max_step: 2",
        says="runner.max_step | recipe.yaml:2 | did you mean runner.max_steps",
    ),
    in_recipe(
        "unknown key deep",
        "lr: 1.0e-3",
        "learning_rate: 1.0e-3",
        says="actor.optim.learning_rate | recipe.yaml:14 | did you mean actor.optim.lr",
    ),
    in_recipe(
        "misplaced key",
        "micro_batch_size: 4",
        "lr: 1.0e-3\n  micro_batch_size: 4",
        says="actor.lr | recipe.yaml:8 | did you mean actor.optim.lr",
    ),
    in_recipe(
        "misplaced section", "max_length: 128", "max_epochs: 3", says="data.max_epochs | did you mean runner.max_epochs"
    ),
    in_recipe(
        "unknown key of an entry",
        "train_data_paths: train.jsonl",
        "train_data_paths: [{path: train.jsonl, wieght: 2}]",
        says="data.train_data_paths[0].wieght | recipe.yaml:16 | weight",
    ),
    with_keys(
        "unknown key in an override",
        "eval.temprature=1",
        says="eval.temprature | override eval.temprature=1 | did you mean eval.temperature",
    ),
    with_keys(
        "unknown setting of the model",
        "actor.model.config_overrides={hiden_size: 8}",
        says="config_overrides.hiden_size | hidden_size",
    ),
    in_recipe(
        "wrong type, text for a number",
        "lr: 1.0e-3",
        "lr: fast",
        says="actor.optim.lr: 'fast' | recipe.yaml:14 | a number > 0",
    ),
    in_recipe(
        "wrong type, fraction of a row",
        "micro_batch_size: 4",
        "micro_batch_size: 2.5",
        says="actor.micro_batch_size: 2.5 | recipe.yaml:8 | whole number",
    ),
    in_recipe(
        "wrong type, yes for true",
        "max_length: 128",
        "shuffle: 'yes'",
        says="data.shuffle: 'yes' | recipe.yaml:18 | true or false",
    ),
    in_recipe(
        "wrong type, a number for a path",
        "train_data_paths: train.jsonl",
        "train_data_paths: 7",
        says="data.train_data_paths: 7 | recipe.yaml:16 | a path or Hub name",
    ),
    in_recipe("broken YAML", "  max_steps: 2", "  max_steps: [2", says="not valid YAML | recipe.yaml: | quotes"),
    Case("no recipe of that name", "train recipee.yaml", says="there is no such recipe | recipee.yaml | recipe.yaml"),
    Case("a directory for a recipe", "train model", says="this is a directory | model | YAML"),
    with_keys(
        "an empty recipe", says="the recipe is empty | recipe.yaml | model: {", prepare=write("recipe.yaml", "# soon\n")
    ),
    Case("no recipe at all", "train actor.optim.lr=1e-3", says="there is no recipe | name a YAML file"),
]

SIZES: list[Case] = [
    with_keys("no rows in a forward", "actor.micro_batch_size=0", says="actor.micro_batch_size: 0 | override | >= 1"),
    with_keys("rows of one token", "data.max_length=1", says="data.max_length: 1 | override | >= 2"),
    with_keys("warm-up longer than training", "actor.optim.lr_warmup_steps_ratio=1.5", says="1.5 | <= 1"),
    with_keys(
        "rows longer than a forward",
        "actor.max_tokens_per_micro_batch=64",
        says="data.max_length (128 tokens) | 64 | override | raise",
    ),
    with_keys(
        "steps by rows and by tokens",
        "actor.global_batch_tokens=512",
        "actor.global_batch_size=8",
        says="global_batch_size (8 | 512 | exclude | keep one",
    ),
    with_keys("final rate above the first", "actor.optim.min_lr=1", says="min_lr (1) | 0.001 | lower it"),
    with_keys(
        "training without end", "runner.max_epochs=-1", "runner.max_steps=-1", says="-1 | would not end | limit one"
    ),
    with_keys("two sets to evaluate on", "data.eval_split=0.1", says="data.eval_split (0.1) | keep one"),
    with_keys(
        "early stop without evaluations",
        "runner.early_stop.enabled=true",
        says="runner.early_stop.enabled | runner.eval_interval",
    ),
    with_keys(
        "answers without evaluation data",
        "data.eval_data_paths=null",
        "eval.generate=true",
        says="eval.generate | evaluation data | data.eval_split",
    ),
    with_keys(
        "a width that heads do not divide",
        "actor.model.from_scratch=true",
        "actor.model.config_overrides={hidden_size: 33}",
        says="hidden size (33) | attention heads (4) | config_overrides",
    ),
    with_keys(
        "rows longer than the model",
        "data.max_length=2000",
        says="max_position_embeddings | 256 | train.jsonl:3 | lower data.max_length",
        prepare=lambda work: write_rows(
            work / "train.jsonl", [*rows(2), chat(("user", "?"), ("assistant", "long " * 80))]
        ),
    ),
    with_keys(
        "more shards than ranks", "actor.parallel.data_shard=3", says="actor.parallel.data_shard | 3 | 1 rank | -1"
    ),
]

FEATURES: list[Case] = [
    with_keys(
        "an adapter on modules that are not there",
        "actor.model.is_lora=true",
        "actor.model.lora.target_modules=[query]",
        says="actor.model.lora.target_modules | called query | all-linear | q_proj",
    ),
    with_keys("settings of no adapter", "actor.model.lora.r=8", says="actor.model.lora.r | no effect | is_lora"),
    with_keys(
        "an adapter that begins with data",
        "actor.model.is_lora=true",
        "actor.model.lora.init=eva",
        says="actor.model.lora.init | eva | data | gaussian",
    ),
    with_keys("vision", "actor.model.model_type=vision_language", says="takes no images | causal_lm"),
    with_keys(
        "an adapter class",
        "actor.model.adapter=mine.py:Mine",
        says="actor.model.adapter | mine.py",
        prepare=write("mine.py", "class Mine: ...\n"),
    ),
    with_keys("options that nobody reads", "actor.model.options={horizon: 8}", says="actor.model.options | horizon"),
    with_keys("tensor parallel", "actor.parallel.tensor=2", says="actor.parallel | tensor 2 | multiple of 2 ranks"),
    with_keys("Ray", "runner.launcher=ray", says="runner.launcher | ray | runner.num_ranks"),
]
