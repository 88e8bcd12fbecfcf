"""What lets code written for transformers' Trainer work here: arguments, overrides, samplers, loaders."""
