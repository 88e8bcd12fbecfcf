"""`stepmark drill`: what faults do to a recipe's run on this machine and storage, before the run."""
