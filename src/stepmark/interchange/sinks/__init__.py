"""Writers: a Stepmark checkpoint, a model folder, and other programs' checkpoints."""
