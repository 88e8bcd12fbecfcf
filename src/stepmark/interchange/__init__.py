"""Checkpoints as other programs want them."""
