"""Parallel training: data, tensor and sequence parallelism, ZeRO-1, sharded loading."""
