"""The samples of a training engine's documentation (RLite's), as it prints them, and what is changed so that they run:

- imports are added, `shardtune` under the printed name `rlite`, its `TrainEngine` under `RliteTrainEngine`; the print
  has none but that of Qwen2;
- all lines of the language sample but the first are indented by one, so it stands in an `if True:`; the methods of the
  adapter's class are not indented at all, so they are;
- the model's name is a path; `tensor_parallel_size=4` is the number of ranks of the run (as printed in the slow test);
- the printed merge of an adapter leaves out its scale, alpha / r (with alpha = r it would be right);
- the blanks `...` of the custom model are filled, and it gets layers and a forward, which the print does not have;
- `prepare_image` is a name that the print does not define, and `AutoProcessor` is the one of `shardtune.nn`, as that of
  transformers needs torchvision for Qwen2.5-VL's videos.

All else stays as it is printed; each change is one `Change` below, which has to find its place exactly once.
"""

from __future__ import annotations

from textwrap import indent

from tests.seeds.guide import Change

LANGUAGE = """\
from transformers import Qwen2Config, Qwen2ForCausalLM

 class MyQwenModel(rlite.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
     def on_weights_materialized(self):
         self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-5)

     def train_step(self, input_ids: list[list[int]], gradient_accumulation_steps: int = 1):
         input_ids = torch.tensor(input_ids, dtype=torch.long, device="cuda")

         logits = self(input_ids).logits[:, :-1].contiguous()
         labels = input_ids[:, 1:].contiguous()

         loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1)).mean()
         loss = loss / gradient_accumulation_steps
         loss.backward()

         return loss.item()

     def optimizer_step(self):
         self.optimizer.step()
         self.optimizer.zero_grad()

 rlite.init()
 with init_empty_weights():
     module = MyQwenModel.from_pretrained("Qwen/Qwen2.5-1.5B-Instruct")
 train_engine = RliteTrainEngine(module, executor="fsdp2")
 train_engine.build(tensor_parallel_size=4)

 losses_for_each_gpu = train_engine.train_step(
     NeedParallel([[1, 2, 3, 4] * 8]),
     gradient_accumulation_steps=4
 )
 train_engine.optimizer_step()
"""
SEQUENCE = """\
seq_parallel_data = NeedParallel([[1, 2, 3, 4] * 8], type="seq")
"""
VISION = """\
class MyQwenVLModel(rlite.nn.HuggingFaceFsdp2TrainModule, Qwen2_5_VLForConditionalGeneration):
    def on_weights_materialized(self):
        # NOTE: This will place the processor on the worker process, which
        #       reduces the communication cost between the main process and
        #       the worker processes.
        model_name_or_path = self.materialization_source()
        self.processor = AutoProcessor.from_pretrained(model_name_or_path, use_fast=True)

        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-5)

    def train_step(
        self,
        messages: list[list[dict]],
        image_urls: list[str],
        gradient_accumulation_steps: int = 1
    ):
        prompt_texts = [
            self.processor.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=True,
            )
            for messages in messages
        ]
        images = [prepare_image(image_url) for image_url in image_urls]
        inputs = self.processor(
            text=prompt_texts,
            images=images,
            return_tensors="pt",
            padding=True,
        ).to("cuda")
        logits = self(**inputs).logits
        # Your loss function here, based on the logits
        loss = logits.mean() / gradient_accumulation_steps
        loss.backward()

    def optimizer_step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
"""
LORA = """\
class LoraTrainModule(rlite.nn.HuggingFaceFsdp2TrainModule):
def preprocess_input_named_parameters(
    self,
    name: str,
    param: torch.Tensor,
) -> tuple[str, torch.Tensor]:
    if not hasattr(self, "weight_mapping"):
        raise ValueError("weight_mapping is not set")
    if name in self.weight_mapping:
        name = self.weight_mapping[name]
    return name, param

def postprocess_output_named_parameters(
    self,
    name: str,
    param: DTensor,
    full_state_dict: dict[str, DTensor]
) -> tuple[str, torch.Tensor]:
    if "base_layer.weight" in name:
        lora_a = full_state_dict[name.replace("base_layer.", "lora_A.default.")]
        lora_b = full_state_dict[name.replace("base_layer.", "lora_B.default.")]
        param = param.full_tensor() + lora_b.full_tensor() @ lora_a.full_tensor()
    else:
        param = param.full_tensor()
    name = name.replace("base_model.model.", "").replace("base_layer.", "")
    return name, param

def _init_lora_B_as_zeros(self):
    with torch.no_grad():
        for name, param in self.named_parameters():
            if "lora_B" in name:
                param.zero_()
"""
CUSTOM = """\
class MyModel(rlite.nn.Fsdp2TrainModule):
    @property
    def non_split_modules(self) -> set[type[torch.nn.Module]]:
        ...

    def materialization_source(self) -> dict[str, torch.Tensor] | dict[str, callable] | str:
        ...
"""

IMPORTS = "import torch\nimport torch.nn.functional as F\nimport shardtune as rlite\n"
ENGINE = (
    "from accelerate import init_empty_weights\nfrom shardtune import NeedParallel, TrainEngine as RliteTrainEngine\n"
)
LANGUAGE_CHANGES = (
    Change(
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n\n",
        f"if True:\n{indent(IMPORTS + ENGINE, ' ')} from transformers import Qwen2Config, Qwen2ForCausalLM\n\n",
        "names of imports; all but the first line of the print is indented by one",
    ),
    Change('"Qwen/Qwen2.5-1.5B-Instruct"', "MODEL", "a path"),
)
FEWER_RANKS = Change("tensor_parallel_size=4", "tensor_parallel_size=RANKS", "the number of ranks of this run")
LORA_METHODS = LORA.partition("\n")[2]
LORA_CHANGES = (
    Change(LORA_METHODS, indent(LORA_METHODS, "    "), "the print does not indent the methods"),
    Change(
        "class LoraTrainModule",
        f"{IMPORTS}from torch.distributed.tensor import DTensor\nclass LoraTrainModule",
        "names of imports",
    ),
    Change(
        "lora_b.full_tensor() @ lora_a.full_tensor()",
        'self.peft_config["default"].lora_alpha / self.peft_config["default"].r * (lora_b.full_tensor() @ '
        "lora_a.full_tensor())",
        "the print leaves out the adapter's scale, alpha / r",
    ),
)
CUSTOM_CHANGES = (
    Change(
        "class MyModel(rlite.nn.Fsdp2TrainModule):\n",
        f"{IMPORTS}class MyModel(rlite.nn.Fsdp2TrainModule):\n"
        "    def __init__(self, source):\n"
        "        super().__init__()\n"
        "        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(2)])\n"
        "        self.source = source\n\n"
        "    def forward(self, x):\n"
        "        return self.blocks[1](torch.tanh(self.blocks[0](x)))\n\n",
        "names of imports, and a model: the print has none",
    ),
    Change("Module]]:\n        ...\n", "Module]]:\n        return {torch.nn.Linear}\n", "a blank"),
    Change("callable] | str:\n        ...\n", "callable] | str:\n        return self.source\n", "a blank"),
)  # fmt: skip
VISION_CHANGES = (
    Change(
        "class MyQwenVLModel(rlite.nn.HuggingFaceFsdp2TrainModule, Qwen2_5_VLForConditionalGeneration):\n",
        f"{IMPORTS}from shardtune.nn import AutoProcessor\n"
        "from PIL import Image\n"
        "from transformers import Qwen2_5_VLForConditionalGeneration\n"
        "def prepare_image(path):\n"
        "    return Image.open(path).convert('RGB')\n"
        "class MyQwenVLModel(rlite.nn.HuggingFaceFsdp2TrainModule, Qwen2_5_VLForConditionalGeneration):\n",
        "names of imports, and a function that the print does not have",
    ),
)
