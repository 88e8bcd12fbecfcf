"""The errors that Stepmark raises for users to read.

StepmarkError                     exit 1: failed, or a check found errors
├── UsageError                    exit 2: wrong usage, such as a path that does not exist; nothing was started
├── DataError                     training or evaluation data is empty or unusable
│   └── DataWorkerLost            a process that loads data has ended unexpectedly
├── MetricsError                  a custom metrics or evaluation function failed, or did not return numbers
│   └── PredictionsTooLarge       what an evaluation gathers would not fit into host memory
├── TrainingDiverged              losses or gradients were not finite, step after step (stop_on_nan)
├── DeviceError                   the device is missing, or does not support the request
├── StepTimeout                   a step did not end in time (step_timeout)
├── FileRefused                   a file is a link, no regular file, or larger than such a file can be
├── LaunchError                   ranks cannot be started or connected, or have lost each other
│   └── PeerFailed                another rank failed first; its error is the one to read
│       └── PeerLost              another rank is gone: killed, or its machine or network failed
└── CheckpointError               a checkpoint cannot be written or read
    ├── CheckpointNotFound        exit 2: the given checkpoint does not exist
    ├── CheckpointDamaged         corrupted: bytes are missing or do not match their checksum
    ├── CheckpointMismatch        valid, but of another model, or lacks what was requested
    ├── CheckpointBusy            another live run owns the folder
    └── CheckpointTimeout         a phase of a save or restore missed its deadline

A message says in one line what is wrong, where, and what to do; the command line prints it as it is.
"""

from __future__ import annotations


class StepmarkError(Exception):
    """Base class of all errors for users; `exit_code` is the exit code of the command line."""

    exit_code = 1


class UsageError(StepmarkError, ValueError):
    """Wrong usage: an unknown field, a value of a wrong type, two fields that contradict each other, a missing path."""

    exit_code = 2


class DataError(StepmarkError):
    """Training or evaluation data is empty or unusable."""


class DataWorkerLost(DataError):
    """A process that loads data has ended unexpectedly, killed perhaps. The data may be as it should."""


class MetricsError(StepmarkError):
    """A custom metrics or evaluation function failed, or did not return numbers."""


class PredictionsTooLarge(MetricsError):
    """What an evaluation gathers for metrics would not fit into host memory."""


class TrainingDiverged(StepmarkError):
    """Losses or gradients were not finite, for as many steps in a row as `stop_on_nan` says."""


class DeviceError(StepmarkError):
    """The device is missing, or does not support the request."""


class StepTimeout(StepmarkError):
    """A step, or what comes between steps, did not end in time (`step_timeout`); the message names the rank that the
    others waited for, and its line of code."""


class FileRefused(StepmarkError, OSError):
    """A file in a folder is a link, not a regular file, or too large: no run has written it."""

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}; remove it, or name another folder"


class LaunchError(StepmarkError):
    """Ranks cannot be started or connected, or have lost each other."""


class PeerFailed(LaunchError):
    """Another rank failed first; its error is the one to read."""


class PeerLost(PeerFailed):
    """Another rank is gone: it was killed, or its machine or network has failed. No rank may be left to say so."""

    @classmethod
    def of(cls, who: str) -> PeerLost:
        """The error about these ranks, described."""
        advice = "look at its output and that machine, then restart the run to resume from its last checkpoint"
        return cls(f"{who} is gone: it was killed, or its machine or network has failed; {advice}")


class CheckpointError(StepmarkError):
    """A checkpoint cannot be written or read."""


class CheckpointNotFound(CheckpointError):
    """The given checkpoint does not exist; as exit code, that is wrong usage."""

    exit_code = 2


class CheckpointDamaged(CheckpointError):
    """A checkpoint is corrupted: bytes are missing, or do not match their checksum."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint is valid, but of another model, or lacks what was requested; `section`: where, if it is in one."""

    section: str | None = None


class CheckpointBusy(CheckpointError):
    """Another live run owns the folder."""


class CheckpointTimeout(CheckpointError):
    """A phase of a save or restore missed its deadline; the message names the late ranks and what they were doing."""
