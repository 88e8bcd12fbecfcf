"""Plain values: exactly what was put in comes out, and nothing else is believed."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.errors import CheckpointDamaged, CheckpointError, UsageError
from stepmark.filesystem.json_values import decode, decode_plain, encode_plain
from tests.support.checkpoint_states import same

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()


def nests(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.dictionaries(keys, children, max_size=4)
        | st.dictionaries(st.sampled_from(["$", "v", "a"]), children, max_size=3)
        | st.dictionaries(keys, children, max_size=3).map(OrderedDict)
        | st.frozensets(st.integers() | st.text(), max_size=3)
        | st.sets(st.integers() | st.text(), max_size=3)
    )


@settings(deadline=None)
@given(st.recursive(scalars, nests, max_leaves=20))
def test_any_nest_comes_back(value: Any) -> None:
    text = json.dumps(encode_plain(value, "x"), allow_nan=False)
    assert same(decode_plain(json.loads(text)), value)


def test_a_nan_keeps_its_bits() -> None:
    import struct

    nan = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    found = decode_plain(json.loads(json.dumps(encode_plain([nan, -0.0], "x"))))
    assert struct.pack(">d", found[0]).hex() == "7ff8000000000123"
    assert math.copysign(1, found[1]) == -1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.text(max_size=4), children, max_size=4)
        | st.fixed_dictionaries(
            {
                "$": st.sampled_from(
                    ["tuple", "set", "dict", "ordered", "float", "int", "complex", "bytes", "array", "scalar", "size"]
                    + ["dtype", "device", "tensor", "frozenset", "nonsense"]
                )
                | children,
                "v": children,
            },
            optional={"dtype": st.sampled_from(["<f4", "O", "|V8", "<U3", "x"]), "shape": children},
        )
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=300)
@given(json_values)
def test_any_json_is_understood_or_refused(value: Any) -> None:
    try:
        decode(value, lambda name: ("tensor", name))
    except CheckpointDamaged as error:
        assert "is malformed" in str(error)
    except CheckpointError as error:
        assert "unknown dtype" in str(error)


def test_deep_nests_are_refused() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UsageError, match="nested too deep"):
        encode_plain(deep, "x")
    with pytest.raises(CheckpointDamaged):
        decode_plain(deep)
