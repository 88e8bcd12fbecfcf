"""fp32 copies of parameters that an optimizer updates in their place, and parameters that a script writes meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class WrittenParameters:
    """Which parameters were written by anything but the optimizer, such as `load_state_dict`.

    It sees what torch counts for autograd: every operation in place, not those on `parameter.data`.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self.forget()

    def forget(self) -> None:
        """From here on writes count; call it after the optimizer's own."""
        self._versions = [parameter._version for parameter in self._parameters]

    def found(self) -> list[Tensor]:
        """Those that were written since."""
        pairs = zip(self._parameters, self._versions, strict=True)
        return [parameter for parameter, version in pairs if parameter._version != version]


def follow(master: Tensor, parameter: Tensor) -> Tensor:
    """The fp32 values of a parameter that was written: the parameter's, but the master's where they are the same up to
    rounding. Both have one shape and device."""
    return torch.where(master.to(parameter.dtype) == parameter, master, parameter.float())
