"""The Trainer's loaders: its own over a dataset, and those around loaders that a subclass returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from stepmark.config.training_fields import GROUP_BY_LENGTH, TrainingFields
from stepmark.data.collate import Padding, PadTo, collate, pad_collated
from stepmark.data.length_groups import LengthGroups, sample_lengths
from stepmark.data.loader import DataLoader
from stepmark.data.stream_loader import StreamLoader, check_readable_again, is_stream
from stepmark.errors import UsageError
from stepmark.runtime.mesh import Mesh
from stepmark.trainer.given_loader import GivenLoader, PlainBatches
from stepmark.trainer.used_columns import ModelColumns, UsedColumns
from stepmark.training.loss import MicroBatchLoss

TrainLoader = DataLoader | GivenLoader


@dataclass(frozen=True)
class LoaderFactory:
    """Makes loaders of this rank's part of the data, as the arguments say."""

    args: TrainingFields
    model: nn.Module
    mesh: Mesh
    loss: MicroBatchLoss
    data_collator: Callable[[list[Any]], Any] | None
    processing_class: Any

    @property
    def data_seed(self) -> int:
        """The seed of the sample order."""
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def train_batches(self, dataset: Any) -> Any:
        """The batches of training data: of a dataset with a length, or of one that can only be iterated."""
        check_readable_again("train_dataset", dataset)
        if is_stream(dataset):
            if self.args.train_sampling_strategy == GROUP_BY_LENGTH:
                raise UsageError(
                    "train_sampling_strategy: samples that can only be iterated are not known before; choose random, "
                    "or group them in the dataset"
                )
            drop_last = self.args.dataloader_drop_last
            return self._stream(dataset, self.args.per_device_train_batch_size, drop_last=drop_last)
        return PlainBatches(self.train_loader(dataset))

    def sampled_batches(self, dataset: Any, sampler: Any) -> Any:
        """The batches of training data in the order of a sampler; None: in that of the dataset."""
        check_readable_again("train_dataset", dataset)
        padded, columns = self._padded, self._columns
        padding = Padding.of(padded.lengths if padded else None, self._pad_token_id, free=not self.mesh.runtime.lazy)
        samples: Any = dataset if columns is None else UsedColumns(dataset, columns)
        return torch.utils.data.DataLoader(
            samples,
            batch_size=self.args.per_device_train_batch_size,
            sampler=sampler,
            collate_fn=partial(_collated, padded.collate_fn if padded else self.data_collator, padding),
            num_workers=self.args.dataloader_num_workers,
            drop_last=self.args.dataloader_drop_last,
        )

    def eval_batches(self, dataset: Any) -> Any:
        """The batches of evaluation data, in order."""
        if is_stream(dataset):
            return self._stream(dataset, self.args.per_device_eval_batch_size)
        return PlainBatches(self._loader(dataset, self.args.per_device_eval_batch_size, shuffle=False))

    def train_loader(self, dataset: Any) -> DataLoader:
        """A loader of training data, at its beginning."""
        return self._loader(
            dataset,
            self.args.per_device_train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            seed=self.data_seed,
            shuffle=self.args.train_sampling_strategy != "sequential",
            lengths=self._lengths(dataset),
            drop_last=self.args.dataloader_drop_last,
        )

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
        if isinstance(batches, PlainBatches):
            return batches.loader
        return GivenLoader(
            batches,
            rank=self.mesh.data_parallel.rank,
            world_size=self.mesh.data_parallel.size,
            accumulation=accumulation,
            seed=self.data_seed,
            labels=self.loss.labels,
            max_steps=self.args.max_steps if self.args.max_steps > 0 else None,
            fixed_shape=self.mesh.runtime.lazy,
        )

    def _stream(self, dataset: Any, batch_size: int, *, drop_last: bool = False) -> StreamLoader:
        if self.args.dataloader_num_workers:
            raise UsageError(
                "dataloader_num_workers: a dataset that can only be iterated is read by the training process; set it "
                "to 0, or override get_train_dataloader and return a DataLoader with workers"
            )
        padded = self._padded
        lengths = padded.lengths if padded else None
        return StreamLoader(
            dataset,
            batch_size,
            collate_fn=padded.collate_fn if padded else self.data_collator,
            padding=Padding.of(lengths, self._pad_token_id, free=not self.mesh.runtime.lazy),
            prepare=lambda sample: sample if (columns := self._columns) is None else columns.of(sample),
            drop_last=drop_last,
        )

    def _loader(self, dataset: Any, batch_size: int, **options: Any) -> DataLoader:
        padded, columns = self._padded, self._columns
        return DataLoader(
            dataset if columns is None else UsedColumns(dataset, columns),
            batch_size,
            rank=self.mesh.data_parallel.rank,
            world_size=self.mesh.data_parallel.size,
            collate_fn=padded.collate_fn if padded else self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            fixed_shape=self.mesh.runtime.lazy,
            pad_to=padded.lengths if padded else None,
            pad_token_id=self._pad_token_id,
            labels=self.loss.labels,
            **options,
        )

    @property
    def _padded(self) -> PadTo | None:
        return self.data_collator if isinstance(self.data_collator, PadTo) else None

    @property
    def _pad_token_id(self) -> int:
        return getattr(self.processing_class, "pad_token_id", None) or 0

    @cached_property
    def _columns(self) -> ModelColumns | None:
        if not self.args.remove_unused_columns:
            return None
        return ModelColumns.of_model(self.model, self.loss.labels, others_read=self._others_read_columns)

    @property
    def _others_read_columns(self) -> bool:
        """Whether code of the user's gets a sample's columns, and not only the model."""
        collator = self.data_collator
        own_collator = collator is not None and not _of_transformers(collator) and self._padded is None
        return own_collator or self.loss.override is not None


def _collated(collator: Callable[[list[Any]], Any] | None, padding: Padding, samples: list[Any]) -> Any:
    places = range(len(samples))
    return collate(samples, places, padding) if collator is None else pad_collated(collator(samples), places, padding)


def _of_transformers(collator: Any) -> bool:
    module = getattr(collator, "__module__", None) or type(collator).__module__
    return str(module).partition(".")[0] == "transformers"
