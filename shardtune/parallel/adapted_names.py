"""The names that parts of a model have without PEFT's layers around them."""


def without_adapter(name: str) -> str:
    """The name that a module or parameter of a model has without adapters."""
    return name.replace(".base_layer", "").replace(".token_adapter", "")
