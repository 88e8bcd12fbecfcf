"""Readers of neuronx-distributed's, optimum-neuron's and torch_xla's checkpoints."""
