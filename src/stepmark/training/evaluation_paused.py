"""How an evaluation ends that a signal stops between two batches."""


class EvaluationPaused(Exception):
    """The run stops in the middle of an evaluation, on all ranks before the same batch."""
