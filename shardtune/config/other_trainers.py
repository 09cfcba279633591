"""Methods that other trainers call by name, and what has their place here, where nothing would call them."""

from __future__ import annotations

_EVENTS = ("train_start", "train_end", "train_batch_start", "train_batch_end", "train_epoch_start", "train_epoch_end")
_FURTHER_EVENTS = ("epoch_begin", "epoch_end", "step_begin", "step_end", "validation_end", "validation_epoch_end")
_OWN_EVENTS = ("evaluate", "save", "rollback")
_OF_THE_RECIPE = {
    **dict.fromkeys(
        ("configure_optimizers", "build_optimizer", "create_optimizer", "create_optimizer_and_scheduler"),
        "actor.optim.name chooses the optimizer, actor.optim.groups other settings for some weights",
    ),
    **dict.fromkeys(
        ("build_lr_scheduler", "create_scheduler", "lr_scheduler_step"), "actor.optim.lr_scheduler chooses the schedule"
    ),
    **dict.fromkeys(("configure_gradient_clipping", "clip_gradients"), "actor.optim.clip_grad bounds the gradient"),
    **dict.fromkeys(
        (f"on_{event}" for event in (*_EVENTS, *_FURTHER_EVENTS, *_OWN_EVENTS)),
        "a class in runner.callbacks gets the events of a run",
    ),
}
_TRAINING = ("training_step", "train_step", "compute_loss")
_EVALUATION = ("validation_step", "test_step", "eval_step", "prediction_step")
_LOADERS = ("train_dataloader", "val_dataloader", "get_train_dataloader", "get_eval_dataloader")

OF_WORKERS = {
    **_OF_THE_RECIPE,
    **dict.fromkeys(_TRAINING, "get_train_model_output returns the loss of a micro-batch"),
    **dict.fromkeys(_EVALUATION, "get_eval_model_output returns what is measured of a micro-batch"),
    **dict.fromkeys(_LOADERS, "build_dataloader makes the batches"),
    "configure_model": "model_provider_func makes the model",
}
"""Of a worker: by the name of a method, what does its work."""

OF_ADAPTERS = {
    **_OF_THE_RECIPE,
    **dict.fromkeys(_TRAINING, "loss returns the loss of a micro-batch"),
    **dict.fromkeys(_EVALUATION, "metrics returns what is measured of a micro-batch"),
    **dict.fromkeys(_LOADERS, "data.train_data_paths names the rows, and encode makes arrays of one"),
    **dict.fromkeys(("configure_model", "build_model"), "build makes the model"),
    "forward": "loss calls the model",
}
"""Of an adapter."""
