"""Hugging Face model folders, written from checkpoints of ours, and read where an adapter is applied to its base."""
