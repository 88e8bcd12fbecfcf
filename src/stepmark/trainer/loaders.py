"""The Trainer's loaders: its own over a dataset, and those around loaders that a subclass returns."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DataCollatorWithPadding, PreTrainedModel, default_data_collator

from stepmark.config.training_fields import GROUP_BY_LENGTH, TrainingFields
from stepmark.data.loader.collate import CollateFn, Collation, PadTo, is_padder, own_padding, sample_lengths
from stepmark.data.loader.labels import LabelRule
from stepmark.data.loader.loader import DataLoader
from stepmark.data.loader.order import LengthGroups
from stepmark.data.loader.stream_loader import StreamLoader, check_readable_again, is_stream
from stepmark.errors import DataError, UsageError
from stepmark.runtime.mesh import Mesh
from stepmark.trainer.compat.given_loader import GivenLoader, PlainBatches, is_sharded
from stepmark.training.model_labels import unwrapped
from stepmark.training.weighted_loss import MicroBatchLoss

# Labels that collators rename, and labels that were shifted already, which forwards take among their other arguments.
ALWAYS = ("label", "label_ids", "shift_labels")

logger = logging.getLogger("stepmark")
_told: set[tuple[str, str]] = set()


def model_columns(model: nn.Module, labels: LabelRule) -> frozenset[str] | None:
    """The columns of a sample that reach a model: the arguments of its forward, and the labels; None, for all, where it
    takes any argument. The further arguments of transformers' models, for attention and loss, are no columns."""
    inner = unwrapped(model)
    parameters = inspect.signature(inner.forward).parameters.values()
    named = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    takes_any = len(named) < len(parameters)
    if takes_any and not (named and isinstance(inner, PreTrainedModel)):
        return None
    return frozenset((*named, *labels.names, *ALWAYS))


def used_columns(sample: Any, names: frozenset[str], model: str, *, others_read: bool) -> Any:
    """The sample, a mapping without the columns that are not in `names`, or anything else as it is. `others_read`: a
    user's loss or collator may want these, so dropping them is a warning. `model`: the class that does not take them.

    Raises DataError where no column is left.
    """
    if not isinstance(sample, Mapping) or names.issuperset(sample):
        return sample
    used = {name: value for name, value in sample.items() if name in names}
    ignored = ", ".join(str(name) for name in sample if name not in names)
    if not used:
        raise DataError(
            f"the dataset's columns ({ignored}) are not among the arguments of {model}.forward; rename them, or set "
            "remove_unused_columns: false for a data_collator that reads them"
        )
    if (model, ignored) not in _told:  # once per process: each evaluation has a loader of its own
        _told.add((model, ignored))
        told = f"columns that {model}.forward does not take are left out, also for compute_loss and data_collator"
        remedy = "set remove_unused_columns: false to keep them"
        logger.log(logging.WARNING if others_read else logging.INFO, "%s: %s; %s", told, ignored, remedy)
    return used


TrainLoader = DataLoader | GivenLoader


@dataclass(frozen=True)
class LoaderFactory:
    """Makes loaders of this rank's part of the data, as the arguments say."""

    args: TrainingFields
    model: nn.Module
    mesh: Mesh
    loss: MicroBatchLoss
    data_collator: CollateFn | PadTo | None
    processing_class: Any
    own_loss: bool  # a user's method computes the loss
    signature: frozenset[str] | None = None  # the columns of a sample that are used; None: those of the model

    @property
    def data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def train_batches(self, dataset: Any) -> Any:
        """The batches of training data: of a dataset with a length, or of one that can only be iterated."""
        _check_training_data(dataset)
        if is_stream(dataset):
            if self.args.train_sampling_strategy == GROUP_BY_LENGTH:
                raise UsageError(
                    "train_sampling_strategy: an iterable dataset cannot be grouped by length; choose random, or group "
                    "the samples in the dataset"
                )
            return self._stream(dataset, self.args.per_device_train_batch_size, self.args.dataloader_drop_last)
        loader = self._loader(
            dataset,
            self.args.per_device_train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            seed=self.data_seed,
            shuffle=self.args.train_sampling_strategy != "sequential",
            lengths=self._lengths(dataset),
            drop_last=self.args.dataloader_drop_last,
            fixed_shape=self.mesh.runtime.lazy or (self.args.torch_compile and self._has_one_shape(dataset)),
        )
        return PlainBatches(loader)

    def sampled_batches(self, dataset: Any, make_sampler: Callable[[], Any]) -> Any:
        """The batches of training data in the order of a sampler; of None in that of the dataset."""
        _check_training_data(dataset)
        batch_size = self.args.per_device_train_batch_size
        return torch.utils.data.DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=make_sampler(),
            collate_fn=partial(self._collation(dataset), indices=range(batch_size)),
            num_workers=self.args.dataloader_num_workers,
            drop_last=self.args.dataloader_drop_last,
        )

    def eval_batches(self, dataset: Any) -> Any:
        if dataset is None:
            raise UsageError("eval_dataset: evaluation needs one")
        batch_size = self.args.per_device_eval_batch_size
        if is_stream(dataset):
            return self._stream(dataset, batch_size)
        loader = self._loader(dataset, batch_size, shuffle=False, fixed_shape=self.mesh.runtime.lazy)
        return PlainBatches(loader, evaluates=True)

    def _has_one_shape(self, dataset: Any) -> bool:
        """Whether samples have one length, or are padded to stated ones, also where shapes are free."""
        own, given = own_padding(dataset, fixed=False), self.data_collator
        if given is None:
            return own is not None and own == own_padding(dataset, fixed=True)
        return isinstance(given, PadTo) and given.lengths is not None

    def _lengths(self, dataset: Any) -> np.ndarray | None:
        """The lengths of the samples where they are grouped by these; the same on all ranks. Collective."""
        if self.args.train_sampling_strategy != GROUP_BY_LENGTH:
            return None
        names = getattr(self.processing_class, "model_input_names", None)
        lengths = sample_lengths(dataset, self.args.length_column_name, names[0] if names else "input_ids")
        digests = self.mesh.context.host.all_gather(LengthGroups(lengths, 1).digest)
        if len(set(digests)) > 1:
            raise UsageError(
                "train_sampling_strategy: group_by_length needs samples of the same lengths on all ranks, and this "
                "dataset's differ; give it a column of lengths, or choose random"
            )
        return lengths

    def steps_of(self, batches: Any, accumulation: int = 1) -> TrainLoader:
        """The steps of `batches`: of an own loader's, or of those that an overridden method has returned."""
        prepared, batches = batches, getattr(batches, "before_prepare", batches)
        if isinstance(batches, PlainBatches):
            return batches.loader
        if is_sharded(batches):
            self.mesh.keep_one_rank("the sampler divides its samples among processes")
        owners = batches, getattr(batches, "batch_sampler", None)
        drops_last = any(getattr(each, "drop_last", False) for each in owners)
        return GivenLoader(
            batches,
            rank=self.mesh.ranks.own,
            world_size=self.mesh.ranks.total,
            accumulation=accumulation,
            seed=self.data_seed,
            labels=self._labels,
            max_steps=self.args.max_steps if self.args.max_steps > 0 else None,
            fixed_shape=self.mesh.runtime.lazy,
            whole_turns=prepared is not batches and drops_last,
        )

    def _stream(self, dataset: Any, batch_size: int, drop_last: bool = False) -> StreamLoader:
        if self.args.dataloader_num_workers:
            raise UsageError(
                "dataloader_num_workers: an iterable dataset is read in the training process; set it to 0, or override "
                "get_train_dataloader and return a DataLoader with workers"
            )
        return StreamLoader(dataset, batch_size, self._collation(dataset), drop_last, self.data_seed)

    def _loader(self, dataset: Any, batch_size: int, **options: Any) -> DataLoader:
        return DataLoader(
            dataset,
            batch_size,
            rank=self.mesh.ranks.own,
            world_size=self.mesh.ranks.total,
            collate_fn=self._collator(dataset),
            processing_class=self.processing_class,
            num_workers=self.args.dataloader_num_workers,
            labels=self._labels,
            prepare=self._prepare,
            **options,
        )

    def _collator(self, dataset: Any) -> CollateFn | PadTo | None:
        """The given one, else what a dataset of Stepmark's declares; None for the default."""
        fixed = self.mesh.runtime.lazy or self.args.sequence_parallel
        return own_padding(dataset, fixed=fixed) if self.data_collator is None else self.data_collator

    def _collation(self, dataset: Any) -> Collation:
        collator, free = self._collator(dataset), not self.mesh.runtime.lazy
        return Collation(
            dataset, collator, self.processing_class, free=free, labels=self.loss.labels, prepare=self._prepare
        )

    @property
    def _labels(self) -> LabelRule:
        """How the loss uses labels. A user's method may also count ignored labels."""
        rule = self.loss.labels
        return replace(rule, skips_ignored=rule.skips_ignored and not self.own_loss)

    @cached_property
    def _prepare(self) -> Callable[[Any], Any] | None:
        """Leaves out the columns of a sample that are not used; None where all are."""
        known = model_columns(self.model, self.loss.labels) if self.signature is None else self.signature
        if not self.args.remove_unused_columns or known is None:
            return None
        collator, read = self.data_collator, self.loss.override is not None
        if collator is not None and not isinstance(collator, PadTo):
            module = getattr(collator, "__module__", None) or type(collator).__module__
            read |= str(module).partition(".")[0] != "transformers"
        model = type(unwrapped(self.model)).__name__
        return partial(used_columns, names=known, model=model, others_read=read and self.signature is None)


def _check_training_data(dataset: Any) -> None:
    if dataset is None:
        raise UsageError("train_dataset: training needs one")
    check_readable_again("train_dataset", dataset)


def default_collator(processing_class: Any) -> CollateFn:
    """The collator that transformers' Trainer has without a given one, for programs that ask for it."""
    return DataCollatorWithPadding(processing_class) if is_padder(processing_class) else default_data_collator
