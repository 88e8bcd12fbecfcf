"""Applying a placement: tensor and sequence parallel, ZeRO-1, loading by shards."""
