"""What a recipe needs before it runs: memory, steps, bytes of a checkpoint. No device and no weights are needed."""
