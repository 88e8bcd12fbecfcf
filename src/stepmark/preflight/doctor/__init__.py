"""`stepmark doctor`: what is on this machine, and what of it would make a run fail."""
