"""The environment and the compile cache of AWS's Neuron."""
