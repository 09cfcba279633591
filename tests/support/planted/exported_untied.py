"""What is exported does not tie its head to its embedding, as training did."""

from shardtune.checkpoint import hf_save

own = hf_save.save_config


def save(model, path, dtype, settings=None):
    own(model, path, dtype, {**(settings or {}), "tie_word_embeddings": False})


hf_save.save_config = save
