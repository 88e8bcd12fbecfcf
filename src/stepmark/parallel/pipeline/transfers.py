"""What neighbouring stages send each other: hidden states forward, their gradients back.

A stage's hidden states may have any shape and dtype: the first time that a batch of some shapes comes, the sender says
which, and both remember; for the same shapes they must stay the same. Where training draws random numbers, the state of
the sender's generator goes along, so that the layers draw what they would draw on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stepmark.errors import UsageError
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.stage_transfers import ENCODED, Exchange, Form


@dataclass
class Activation:
    """Hidden states between two stages, on their way or arrived, and what gives the generator's state beside them."""

    hidden: Tensor
    generator: Callable[[], Tensor] | None = None
    exchange: Exchange | None = None

    def arrived(self) -> Tensor:
        """The hidden states, once they are here."""
        if self.exchange is not None:
            self.exchange.arrived()
            self.exchange = None
        return self.hidden


class Transfers:
    """The exchanges of one rank with the others of its pipeline.

    `begin` starts one and returns at once; `settle` waits for those of earlier ticks, so that few tensors are held.
    """

    def __init__(self, mesh: Mesh, *, draws: bool) -> None:
        """`draws`: the model draws random numbers, or may; it can be set when that is known."""
        assert mesh.links is not None
        self._links = mesh.links
        self._runtime = mesh.runtime
        self.draws = draws
        self._forms: dict[Hashable, Form] = {}
        self._running: list[tuple[int, Exchange]] = []  # with the tick that they began in
        self._tick = 0

    def begin(
        self,
        other: int,
        outgoing: Sequence[tuple[int, Hashable, Activation]],
        incoming: Sequence[tuple[int, Hashable]],
        gradients: Sequence[Tensor],
        expected: Sequence[Form],
    ) -> tuple[list[Activation], list[Activation]]:
        """Starts an exchange with rank `other` of the pipeline; returns the incoming activations and gradients.

        Args:
            outgoing: Activations to send: the stage that made each, and the shapes of its batch.
            incoming: The same of those that `other` sends.
            gradients: Gradients to send.
            expected: The forms of those that `other` sends.
        """
        forms = self._agree(other, outgoing, incoming)
        generators = self._exchange_generators(other, outgoing, len(incoming))
        sent = [each.hidden for _, _, each in outgoing] + list(gradients)
        exchange = self._links.exchange(other, sent, [*forms, *expected])
        self._running.append((self._tick, exchange))
        hidden, back = exchange.received[: len(forms)], exchange.received[len(forms) :]
        arriving = [Activation(each, state, exchange) for each, state in zip(hidden, generators, strict=True)]
        return arriving, [Activation(each, None, exchange) for each in back]

    def _exchange_generators(
        self, other: int, outgoing: Sequence[tuple[int, Hashable, Activation]], count: int
    ) -> list[Callable[[], Tensor] | None]:
        """Sends the states that go with activations; what gives those of `count` incoming ones, once they are here."""
        states = [each.generator() for _, _, each in outgoing if each.generator is not None]
        if not self.draws or not (states or count):
            return [None] * count
        form = Form.of(self._runtime.generator_state())
        exchange = self._links.exchange_on_host(other, states, [form] * count)
        self._running.append((self._tick, exchange))
        return [lambda index=index: exchange.arrived()[index] for index in range(count)]  # type: ignore[misc]

    def _agree(
        self, other: int, outgoing: Sequence[tuple[int, Hashable, Activation]], incoming: Sequence[tuple[int, Hashable]]
    ) -> list[Form]:
        """The forms of the incoming activations."""
        told = []
        for stage, shapes, each in outgoing:
            form, known = Form.of(each.hidden), self._forms.get((stage, shapes))
            if known is None:
                self._forms[stage, shapes] = form
                told.append(form.encoded())
            elif known != form:  # the next stage, which was told another form for such batches, would receive garbage
                raise UsageError(
                    f"pipeline_parallel_size: the hidden states after stage {stage} were {list(known.shape)} "
                    f"{known.dtype} and are {list(form.shape)} {form.dtype} for inputs of the same shapes, so the next "
                    "stage cannot know what comes; set it to 1"
                )
        unknown = [key for key in dict.fromkeys(incoming) if key not in self._forms]
        if told or unknown:
            headers = self._links.exchange_on_host(other, told, [ENCODED] * len(unknown))
            self._running.append((self._tick, headers))
            self._forms |= zip(unknown, map(Form.decoded, headers.arrived()), strict=True)
        return [self._forms[key] for key in incoming]

    def settle(self, keep: int = 0) -> None:
        """Ends a tick: waits for the exchanges of all ticks but the latest `keep`, and forgets those that are over."""
        for tick, exchange in self._running:
            if tick <= self._tick - keep:
                exchange.left()
        self._running = [each for each in self._running if each[0] > self._tick - keep and not each[1].over]
        self._tick += 1

    def of_stage(self, hidden: Tensor) -> Activation:
        """An activation to send, with the generator's state where it matters."""
        if not self.draws:
            return Activation(hidden)
        state = self._runtime.generator_state()
        return Activation(hidden, lambda: state)

    def resume_generator(self, activation: Activation) -> None:
        """Draws from here on what the sender would have drawn."""
        if activation.generator is not None:
            self._runtime.set_generator_state(activation.generator())


def shapes_of(inputs: Mapping[str, Any]) -> Hashable:
    """What the shapes of hidden states depend on."""
    return tuple((name, tuple(value.shape)) for name, value in sorted(inputs.items()) if isinstance(value, Tensor))
