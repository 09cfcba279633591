"""How a promise is checked: the conformance kit for adapters."""
