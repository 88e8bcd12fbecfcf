"""Every error that Stepmark raises on purpose.

StepmarkError                     exit 1: it failed, or what was checked is bad
├── UsageError                    exit 2: the call is wrong; nothing was started
├── DataError                     training or evaluation data is missing, empty or unusable
├── MetricsError                  a metrics or evaluation function of the user's failed, or gave no numbers
├── DeviceError                   the device is missing, or cannot do what was asked
├── LaunchError                   ranks cannot be started, found or kept together
│   └── PeerFailed                another rank failed, and its error is the one to read
└── CheckpointError               a checkpoint cannot be written or read
    ├── CheckpointNotFound        there is none where one was named
    ├── CheckpointDamaged         bytes are missing or differ from their digest
    ├── CheckpointMismatch        whole, but of another model, or holds less than was asked for
    ├── CheckpointBusy            another live run owns the folder
    └── CheckpointTimeout         a phase of a save or restore outlasted its deadline

A message says what is wrong, where, and what to do; it is one line, as the command line prints it.
"""

from __future__ import annotations


class StepmarkError(Exception):
    """Base of all errors that are a user's to read; `exit_code` is what the command line ends with."""

    exit_code = 1


class UsageError(StepmarkError):
    """The call is wrong: an unknown field, a value of the wrong type, two fields that contradict each other."""

    exit_code = 2


class DataError(StepmarkError):
    """Training or evaluation data is missing, empty or unusable."""


class MetricsError(StepmarkError):
    """A metrics or evaluation function of the user's failed, or gave no numbers."""


class DeviceError(StepmarkError):
    """The device is missing, or cannot do what was asked of it."""


class LaunchError(StepmarkError):
    """Ranks cannot be started, found or kept together."""


class PeerFailed(LaunchError):
    """Another rank failed, and its error is the one to read."""


class CheckpointError(StepmarkError):
    """A checkpoint cannot be written or read."""


class CheckpointNotFound(CheckpointError):
    """There is no checkpoint where one was named."""


class CheckpointDamaged(CheckpointError):
    """Bytes of a checkpoint are missing, or differ from their digest."""


class CheckpointMismatch(CheckpointError):
    """A whole checkpoint, but of another model, or one that holds less than was asked for."""


class CheckpointBusy(CheckpointError):
    """Another live run owns the folder."""


class CheckpointTimeout(CheckpointError):
    """A phase of a save or restore outlasted its deadline; the message names the ranks that are late, and where."""
