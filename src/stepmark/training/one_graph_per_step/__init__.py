"""How one graph per step is kept on a lazy device.

A lazy device records operations and compiles every graph that it has not seen before, for seconds on a CPU and minutes
on an accelerator. Target: with one micro-batch per step, one training graph, executed once per step; with accumulation,
one for the micro-step and one for the update. This takes:

- The same shapes. Blocks have one length, incomplete batches are filled with rows that do not count, and custom data is
  padded to a few stated lengths (data/loader/).
- No value in the graph. Learning rate, bias correction and token counts change from step to step, and a Python number
  that is 0 or 1 becomes a constant. They are computed on the host and placed as tensors of one element
  (micro_batches.py, parallel/optimizer/own_classes.py). The rank is device data too (`LazyAxis` in
  runtime/collectives.py).
- No value read in the step. transformers' models read masks, positions and routers to choose a path; here they choose
  by shape (transformers_forward.py). Losses and norms stay on the device until they are logged. Reads by custom code
  are reported with their source line (trainer/telemetry/lazy_device.py).
- The same tensors. Optimizer states are created before the first step. Restoring writes into existing parameters
  (`Runtime.write`), since new ones would be other inputs. A save copies complete tensors to the host and slices there.
- No weights among the results. A pipeline stage ends its graph between forward and backward pass; what autograd saved
  of a weight is derived again from the parameter (saved_weights.py).
- One function that ends a graph, `Runtime.step_boundary`: it is called after each micro-step (micro_batches.py,
  pipelined_micro_batches.py) and after the update (step.py).

`stepmark precompile` makes the graphs ahead of a run; metrics count compilations and executions (`Runtime.counters`).
"""
