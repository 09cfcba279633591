"""Losses and estimates of post-training methods, as pure functions of tensors; `shardtune.nn.functional` names them."""
