"""Values that contradict each other are refused before anything starts."""

import pytest

from shardtune.errors import ConfigError

EVAL = "data.eval_data_paths=eval.jsonl"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["actor.global_batch_size=8", "actor.global_batch_tokens=4096"], "exclude each other"),
        (["actor.global_batch_size=null"], "sets the size of an optimizer step"),
        (["actor.micro_batch_size=null"], "leaves the forward pass without a limit"),
        (
            ["actor.max_tokens_per_micro_batch=1024"],
            "data.max_length (2048 tokens) is more than one forward pass may hold",
        ),
        (["actor.optim.min_lr=1e-4"], "is above actor.optim.lr (1e-05)"),
        (
            ["actor.optim.lr_warmup_steps=5", "actor.optim.lr_warmup_steps_ratio=0.1"],
            "both set the length of the warm-up",
        ),
        (["actor.optim.lr_scheduler=constant", "actor.optim.min_lr=1e-6"], "has no effect"),
        (["actor.optim.decay_ratio=0.2"], "has no effect with actor.optim.lr_scheduler: cosine"),
        (["actor.optim.lr_warmup_from_zero=true"], "has no effect without a warm-up"),
        (["actor.optim.groups=[{pattern: norm}]"], "groups[0] (norm) has neither lr nor weight_decay"),
        (["data.max_bad_rows=3"], "data.max_bad_rows (3) has no effect with data.on_bad_row: fail"),
        (["data.image_hosts=[a.b]"], "data.image_hosts has no effect with model_type: causal_lm"),
        (["data.eval_data_paths=[{path: a.jsonl, weight: 4}]"], "has no effect: every row is evaluated once"),
        (["data.eval_data_paths={a: {path: a.jsonl, weight: 4}}"], "a.jsonl of the set a has no effect"),
        (
            [
                "actor.model.is_lora=true",
                "actor.training_backend=fsdp1",
                "actor.model.lora.target_parameters=[experts.w]",
            ],
            "needs training_backend: fsdp",
        ),
        (["runner.max_epochs=-1"], "training would not end"),
        (["data.mixed_files=2"], "data.mixed_files (2) has no effect with data.cache: whole"),
        (["data.cache=by_file"], "data.cache: by_file needs runner.max_steps"),
        (["data.cache=by_file", "runner.max_steps=5", "data.eval_split=0.1"], "data.eval_split holds out rows of all"),
        (["data.cache=by_file", "runner.max_steps=5", "data.on_too_long=split"], "split makes several rows of one"),
        (["data.cache=by_file", "runner.max_steps=5", "data.audit.max_duplicates=0"], "data.audit counts rows of all"),
        (
            ["data.cache=by_file", "runner.max_steps=5", "actor.teacher.top_k=4"],
            "stores the teacher's tokens of all rows",
        ),
        (["data.cache=by_file", "runner.max_steps=5", "data.quarantine=q.jsonl"], "looks for its rows in all files"),
        (
            ["data.ignored_keys=[turn, loss_weight]"],
            "data.ignored_keys: loss_weight is a key that messages are read by",
        ),
        (["data.ignored_keys=[thinking]"], "data.ignored_keys: thinking is a key that messages are read by"),
        (
            ["actor.model.low_cpu_mem_usage=false", f"actor.model.adapter={__file__}:Own"],
            "low_cpu_mem_usage: false has no effect with an adapter",
        ),
        (
            ["runner.overwrite=true", "runner.resume_dir=runs/other"],
            "continues from a checkpoint, and runner.overwrite: true begins anew",
        ),
        (["runner.logger.prometheus.port=9000"], "without prometheus in runner.logger.logger_backends"),
        (["runner.logger.rank_logs=true"], "runner.logger.rank_logs has no effect on a single process"),
        (["eval.generate=true"], "eval.generate: true needs evaluation data"),
        (["actor.model.model_type=seq2seq", "eval.num_samples=9"], "eval.num_samples has no effect without"),
        (["runner.keep_every=20"], "runner.keep_every (20) has no effect with runner.save_interval: -1"),
        (["runner.keep_every=25", "runner.save_interval=10"], "(25) is no multiple of runner.save_interval (10)"),
        (["actor.optim.ema_use=false"], "actor.optim.ema_use: false has no effect without actor.optim.ema_decay"),
        (["eval.match=numeric"], "eval.match has no effect without eval.generate"),
        (["eval.temperature=0.5", "eval.num_samples=9"], "temperature and eval.num_samples have no effect without"),
        (["eval.episodes=9"], "eval.episodes has no effect without eval.environment"),
        (["eval.action_steps=2"], "eval.action_steps has no effect with causal_lm, which predicts no actions"),
        (["eval.environment_options={max_steps: 9}"], "environment_options has no effect without eval.environment"),
        (["runner.val_check_interval=10"], "runner.val_check_interval: 10 needs evaluation data"),
        (["runner.val_check_interval=epoch"], "runner.val_check_interval: epoch needs evaluation data"),
        (["runner.eval_before_training=true"], "needs evaluation data"),
        (["runner.early_stop.enabled=true"], "runner.early_stop.enabled: true needs evaluation data"),
        (["runner.best.monitor=eval/loss"], "runner.best.monitor: eval/loss needs evaluation data"),
        (["runner.early_stop.enabled=true", EVAL], "needs evaluations during training"),
        (["runner.spike.factor=5", "runner.spike.window=70"], "spike.window have no effect without runner.on_spike"),
        (
            ["runner.early_stop.patience=2"],
            "runner.early_stop.patience has no effect without runner.early_stop.enabled",
        ),
        (["runner.spike.factor=5"], "runner.spike.factor has no effect without runner.on_spike"),
        (["runner.on_spike=skip", "runner.spike.window=10"], "is less than runner.spike.warmup_steps (20)"),
        (["runner.on_nonfinite=stop", "runner.max_anomalies=3"], "where the first one ends the run"),
        (["runner.anomaly_window=50"], "runner.anomaly_window (50) has no effect without runner.max_anomalies"),
        (["data.eval_split=0.1", EVAL], "both choose the evaluation rows"),
        (
            ["actor.optim.state_dtype=int8", "actor.optim.name=RMSprop"],
            "AdamW, Adam, SGD, not with actor.optim.name: RMSprop",
        ),
        (["actor.optim.state_dtype=bf16", "actor.optim.name=SGD"], "has no effect on SGD without momentum"),
        (
            ["actor.optim.state_dtype=bf16", "actor.optim.args={fused: true}"],
            "actor.optim.args.fused does not work with",
        ),
        (
            ["actor.optim.state_dtype=int8", "actor.training_backend=fsdp1"],
            "does not work with actor.training_backend: fsdp1",
        ),
        (
            ["actor.model.precision=pure_bf16", "actor.optim.name=RMSprop"],
            "precision: pure_bf16 works with AdamW, Adam, SGD, not with actor.optim.name: RMSprop",
        ),
        (
            ["actor.model.precision=pure_bf16", "actor.optim.args={foreach: true}"],
            "args.foreach does not work with actor.model.precision: pure_bf16",
        ),
        (
            ["actor.model.precision=pure_bf16", "actor.training_backend=fsdp1"],
            "precision: pure_bf16 does not work with actor.training_backend: fsdp1",
        ),
        (["actor.model.precision=pure_bf16", "actor.model.is_lora=true"], "pure_bf16 is for training all weights"),
        (
            ["actor.parallel.sequence_method=ring"],
            "sequence_method (ring) has no effect with actor.parallel.sequence: 1",
        ),
        (["actor.fsdp_config.prefetch=2", "actor.training_backend=ddp"], "which has nothing to gather"),
        (["actor.fsdp_config.prefetch=2", "actor.training_backend=fsdp1"], "which gathers in its own way"),
        (
            ["actor.model.gradient_checkpointing=selective", "actor.model.compile=true"],
            "selects among a layer's operations",
        ),
        (["actor.model.compile=true", "actor.parallel.tensor=2"], "does not work with actor.parallel.tensor: 2"),
    ],
)
def test_contradictions(load, overrides, expected):
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    assert expected in str(error.value)
    assert f"where:  override {overrides[-1]}" in str(error.value) or f"override {overrides[0]}" in str(error.value)
    assert "remedy: " in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.global_batch_tokens=4096"],
        ["actor.global_batch_size=null", "actor.global_batch_tokens=4096"],
        ["actor.micro_batch_size=null", "actor.max_tokens_per_micro_batch=2048"],
        ["actor.optim.lr_scheduler=wsd", "actor.optim.decay_ratio=1.0", "actor.optim.min_lr=1e-5"],
        ["runner.max_epochs=-1", "runner.max_steps=10"],
        ["eval.generate=true", "data.eval_split=0.1"],
        ["eval.generate=false", "eval.match=numeric"],
        ["eval.environment=null", "eval.episodes=9"],
        ["actor.model.model_type=vision_language_action", "eval.temporal_ensembling=0.01"],
        ["actor.model.model_type=seq2seq", "eval.max_new_tokens=9", "eval.temperature=0.5"],
        ["runner.keep_every=20", "runner.save_interval=10"],
        ["runner.keep_every=20", "runner.save_interval=epoch"],
        [f"actor.worker={__file__}:Worker", "eval.max_new_tokens=9"],
        ["runner.early_stop.enabled=true", "runner.val_check_interval=epoch", EVAL],
        ["runner.best.monitor=eval/math/loss", "data.eval_data_paths={math: a.jsonl}"],
        ["runner.best.monitor=train/loss"],
        ["actor.optim.state_dtype=int8", "actor.optim.args={maximize: true}"],
        ["actor.optim.state_dtype=int8", "actor.optim.name=SGD", "actor.optim.args={momentum: 0.9}"],
        ["actor.optim.state_dtype=bf16", "actor.training_backend=fsdp1"],
        ["actor.model.precision=pure_bf16", "actor.optim.name=SGD"],
        ["actor.model.gradient_checkpointing=selective", "actor.fsdp_config.prefetch=3"],
        ["actor.model.compile=true", "actor.parallel.sequence=2", "runner.nproc_per_node=2"],
        ["actor.model.freeze=['embed','layers\\.0\\.']"],
        ["actor.model.model_type=my_registered_model"],
        ["actor.parallel.data_shard=2", "runner.nproc_per_node=2"],
    ],
)
def test_what_fits_together_passes(load, overrides):
    assert load(*overrides).to_dict()


def test_several_contradictions_come_together(load):
    with pytest.raises(ConfigError) as error:
        load("eval.generate=true", "runner.max_epochs=-1", "actor.optim.min_lr=1", "actor.model.lora.r=8")
    assert str(error.value).startswith("4 mistakes")


@pytest.mark.parametrize(("name", "value"), [("use_dora", "true"), ("base_dtype", "nf4")])
def test_adapters_that_need_whole_matrices_are_not_shared(load, name, value):
    with pytest.raises(ConfigError, match=f"lora.{name}: {value} needs parallel.tensor: 1"):
        load(
            "actor.model.is_lora=true",
            "runner.nproc_per_node=2",
            "actor.parallel.tensor=2",
            f"actor.model.lora.{name}={value}",
        )
