"""Fast parts of other libraries in the place of a model's own modules, each compared with what it replaces."""
