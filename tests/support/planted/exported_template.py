"""What is exported has another chat template: no line break after a turn."""

from shardtune.checkpoint import hf_save

own = hf_save._save_reader


def save(reader, path, chat_template):
    own(reader, path, chat_template and chat_template.replace("<|im_end|>\n", "<|im_end|>"))


hf_save._save_reader = save
