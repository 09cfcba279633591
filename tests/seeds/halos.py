"""The samples of HALOs' page on its SFT trainer, as it prints them, and what is changed so that they run.

A change is listed with its reason. The page's blanks are the bodies of a method and of a function, whose contents it
describes; and it names classes that it does not print (`BasicTrainer`, `SFTDataLoader`).
"""

from __future__ import annotations

import shlex
from textwrap import indent

from tests.seeds.guide import Change, changed

SIGNATURE = '''\
class SFTTrainer(BasicTrainer):
    use_reference_model = False

    def get_batch_metrics(
        self,
        batch: Dict[str, Union[List, torch.LongTensor]],
        mode: str = 'train'
    ) -> Tuple[torch.Tensor, Dict]:
        """Compute NLL loss over target tokens.

        Args:
            batch: Must contain 'target_combined_input_ids',
                   'target_combined_attention_mask', 'target_labels'
            mode: 'train', 'eval', or 'sample'

        Returns:
            loss: Normalized NLL loss
            metrics: Dict with 'logps/{mode}' and 'loss/{mode}'
        """

# Orchestration entry point:
def main(config: DictConfig) -> None:
    """Main entry point. Resolves config, loads model, creates trainer, runs training."""
'''
BASIC = r"""
accelerate launch \
    --config_file accelerate_config/fsdp_4gpu.yaml \
    --main_process_port 29501 \
    launch.py \
    loss=sft \
    model=llama \
    datasets=[ultrachat] \
    exp_name=llama3-8B-sft \
    ++cache_dir=/models \
    ++model.name_or_path=meta-llama/Meta-Llama-3-8B
"""
WITH_LORA = r"""
accelerate launch \
    --config_file accelerate_config/fsdp_4gpu.yaml \
    launch.py \
    loss=sft \
    model=llama \
    datasets=[ultrachat] \
    exp_name=llama3-8B-sft-lora \
    ++model.name_or_path=meta-llama/Meta-Llama-3-8B \
    ++model.use_peft=true \
    ++model.peft.lora_r=64 \
    ++model.peft.lora_alpha=256
"""

LOSS = """
logits = self.policy(
    batch['target_combined_input_ids'], attention_mask=batch['target_combined_attention_mask']
).logits.to(self.policy_dtype)
logps = self.get_batch_logps(logits, batch['target_labels'])
tokens = (batch['target_labels'][:, 1:] != -100).sum()
loss = -logps.sum() / tokens
return loss, {f'logps/{mode}': logps.detach().sum() / tokens, f'loss/{mode}': loss.detach()}
"""
ORCHESTRATION = """
OmegaConf.resolve(config)
tokenizer = AutoTokenizer.from_pretrained(config.model.name_or_path)
model = AutoModelForCausalLM.from_pretrained(config.model.name_or_path, dtype=torch.float64)
microbatch_size = config.model.batch_size // int(os.environ.get('WORLD_SIZE', 1)) // 2
train_dataset, eval_dataset = (
    SFTDataLoader(config.datasets, tokenizer, split, microbatch_size) for split in ('train', 'test')
)
SFTTrainer(config, model, train_dataset, eval_dataset, tokenizer=tokenizer).train()
"""
IMPORTS = """\
import json
import os
import shlex
import sys
from typing import Dict, List, Tuple, Union

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardtune.halos import BasicTrainer
"""
DATA_LOADER = '''\
class SFTDataLoader:
    """Iterator producing batches with target_combined_input_ids, target_labels."""

    def __init__(self, datasets, tokenizer, split, microbatch_size):
        self.examples = [json.loads(line) for name in datasets for line in open(f'{name}_{split}.jsonl')]
        self.tokenizer, self.microbatch_size = tokenizer, microbatch_size

    def __iter__(self):
        for first in range(0, len(self.examples), self.microbatch_size):
            yield self.collate(self.examples[first:first + self.microbatch_size])

    def collate(self, examples):
        found = []
        for example in examples:
            prompt, whole = (
                self.tokenizer.apply_chat_template(turns, add_generation_prompt=asked, return_dict=False)
                for turns, asked in ((example['messages'][:1], True), (example['messages'], False))
            )
            found.append((whole, [-100] * len(prompt) + whole[len(prompt):]))
        length = max(len(whole) for whole, _ in found)
        pad = lambda rows, value: torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])
        return {
            'target_combined_input_ids': pad([whole for whole, _ in found], self.tokenizer.pad_token_id),
            'target_combined_attention_mask': pad([[1] * len(whole) for whole, _ in found], 0),
            'target_labels': pad([labels for _, labels in found], -100),
            'original_prompt': [example['messages'][0]['content'] for example in examples],
        }
'''
ENTRY = """
@hydra.main(version_base=None, config_path='config', config_name='config')
def hydra_main(config):
    main(config)


if __name__ == '__main__':
    hydra_main()
    sys.argv[1:] = shlex.split(os.environ['SECOND'])
    hydra_main()
"""
CLASS = "class SFTTrainer(BasicTrainer):\n"
LOGGED = "            metrics: Dict with 'logps/{mode}' and 'loss/{mode}'\n        \"\"\"\n"
RESOLVES = '    """Main entry point. Resolves config, loads model, creates trainer, runs training."""\n'
LAUNCH = (
    Change(CLASS, f"{IMPORTS}\n\n{DATA_LOADER}\n\n{CLASS}", "names of imports; the data loader that the table names"),
    Change(LOGGED, LOGGED + indent(LOSS, "        "), "a blank: the loss that the description has in words"),
    Change(
        RESOLVES,
        RESOLVES + indent(ORCHESTRATION, "    ") + ENTRY,
        "a blank: what the description lists, two micro-batches on each rank; Hydra's entry, for both commands in turn",
    ),
)
"""What makes the printed signature a `launch.py`."""
COMMAND = (Change("++cache_dir=/models", "++cache_dir=models", "a test writes into its own directory"),)
"""The port differs too: 29501 may be taken here. The model and the data lie where the names of the downloads say."""
CONFIG = {
    "config.yaml": """\
defaults: [_self_, {model: '???'}, {loss: '???'}]
exp_name: ???
datasets: ???
cache_dir: runs
local_run_dir: ${cache_dir}/${exp_name}
wandb: {enabled: false, entity: null, project: halos}
n_epochs: 1
eval_every: 32
""",
    "loss/sft.yaml": "{trainer: SFTTrainer, dataloader: SFTDataLoader}\n",
    "model/llama.yaml": """\
name_or_path: null
block_name: LlamaDecoderLayer
policy_dtype: float64
batch_size: 32
gradient_accumulation_steps: 1
activation_checkpointing: true
use_peft: false
peft: {lora_r: 64, lora_alpha: 256, lora_dropout: 0.0, target_modules: all-linear}
""",
}
"""A user's config groups, which the commands choose from; fp64 and no dropout, so that numbers can be compared."""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_sync_module_states: true
  fsdp_version: 2
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 4
use_cpu: false
"""
"""What `accelerate config` writes for four GPUs; here they are four processes on the CPU."""


def launch_file() -> str:
    return changed(SIGNATURE, LAUNCH)


def words(command: str) -> tuple[list[str], list[str]]:
    """A printed command before and after `launch.py`, with its changes."""
    for change in COMMAND:
        command = command.replace(change.printed, change.here)
    given = shlex.split(command.replace("\\\n", " "))
    place = given.index("launch.py")
    return given[:place], given[place + 1 :]
