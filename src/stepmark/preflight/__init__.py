"""Questions before a run: what it needs (`plan`), its graphs (`precompile`), this machine (`doctor`)."""
