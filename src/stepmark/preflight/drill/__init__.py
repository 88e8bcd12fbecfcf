"""`stepmark drill`: what faults do to a recipe's runs, tried on the real machines and storage."""
