"""Checkpoints of other programs, in and out. cli/ alone imports it."""
