"""Checkpoints written for other tools, one module a format."""
