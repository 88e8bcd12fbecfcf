"""Samples as batches: order, shares of the ranks, collation, prefetching, a position that can be saved."""
