"""A plugin: LoRA is scaled by alpha instead of alpha / r."""

from peft.tuners.lora import LoraLayer

update_layer = LoraLayer.update_layer


def scaled(self, adapter_name, r, *arguments, **settings):
    update_layer(self, adapter_name, r, *arguments, **settings)
    self.scaling[adapter_name] *= r


LoraLayer.update_layer = scaled
