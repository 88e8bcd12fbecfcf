"""The checkpoints of other tools, one module a format."""
