"""Tensors in files, without torch: pickles and torch.save, safetensors, arrays that are read in parts."""
