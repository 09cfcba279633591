"""The modules that `shardtune.TrainEngine` runs on all ranks; their home is `shardtune.engine.nn`."""

from shardtune.engine.nn import (
    AutoProcessor,
    BaseHuggingFaceTrainModule,
    BaseTrainModule,
    Fsdp2TrainModule,
    HuggingFaceFsdp2TrainModule,
    LoraTrainModule,
)

__all__ = [
    "AutoProcessor",
    "BaseHuggingFaceTrainModule",
    "BaseTrainModule",
    "Fsdp2TrainModule",
    "HuggingFaceFsdp2TrainModule",
    "LoraTrainModule",
]
