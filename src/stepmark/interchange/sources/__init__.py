"""Readers of other programs' checkpoints, one module a format."""
