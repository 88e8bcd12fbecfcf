"""The names, order and shapes of a model's parameters, from its config."""
