"""fp32 copies of parameters that an optimizer updates in their place, and parameters that a script writes meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from stepmark.runtime.base import Runtime


class WrittenParameters:
    """Which parameters of a lazy device were written by anything but the optimizer, such as `load_state_dict`. On eager
    devices values are compared (`follow`): torch does not count what is written to `parameter.data`."""

    def __init__(self, parameters: Sequence[Tensor], runtime: Runtime) -> None:
        self._runtime = runtime
        self._parameters = list(parameters) if runtime.lazy else []
        self.forget()

    def forget(self) -> None:
        """From here on writes count; call it after the optimizer's own."""
        self._versions = [self._runtime.version(parameter) for parameter in self._parameters]

    def found(self) -> list[Tensor]:
        """Those that were written since."""
        pairs = zip(self._parameters, self._versions, strict=True)
        return [parameter for parameter, version in pairs if self._runtime.version(parameter) != version]


@torch.no_grad()
def follow(master: Tensor, parameter: Tensor) -> Tensor:
    """The fp32 master with the values of a parameter that was written, in place: the parameter's, where the two are not
    the same up to rounding. Both have one shape and device; nothing waits for that."""
    rounded = master.to(parameter.dtype)
    known = parameter.device.type == "cpu" and not is_fake(parameter)
    if not (known and torch.equal(rounded, parameter)):
        master.copy_(torch.where(rounded == parameter, master, parameter.float()))
    return master
