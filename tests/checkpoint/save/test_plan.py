"""Which rank writes what: every byte once, evenly, complete tensors per node, some by the first rank alone; and headers
that stay within bounds."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK, checksum_blocks, covering_blocks
from stepmark.checkpoint.format.manifest import Manifest, parse_manifest
from stepmark.checkpoint.format.tensor_file import Header, header_size, parse_header
from stepmark.checkpoint.save import plan as planning
from stepmark.checkpoint.save.commit import tensor_entries
from stepmark.checkpoint.save.plan import Holding, SavePlan, SliceRecord, plan_save
from stepmark.errors import UsageError
from stepmark.sharding.layout import Box, TensorSlice
from stepmark.sharding.overlap import disjoint

SAVE = "0123abcd-000001"


def whole(group: str, name: str, shape: tuple[int, ...], dtype: str = "F32") -> SliceRecord:
    return SliceRecord(group, name, dtype, shape, TensorSlice.full(shape))


def check_every_byte_once(plan: SavePlan, ranks: int) -> list[int]:
    loads = [0] * ranks
    for file in plan.files:
        position = 0
        for share in file.shares:
            assert share.begin == position
            position = share.end
            assert share.begin % CHECKSUM_BLOCK == 0
            loads[share.rank] += share.end - share.begin
        assert position == file.data_size
        assert file.header_size % 4096 == 0
        for one, other in pairwise(file.tensors):
            assert one.end == other.begin
        assert len({tensor.name for tensor in file.tensors}) == len(file.tensors)
    assert tuple(loads) == plan.loads
    assert len({file.name for file in plan.files}) == len(plan.files)
    return loads


tables = st.lists(
    st.tuples(
        st.sampled_from(["model", "optimizer/optimizer", "state/x"]),
        st.lists(st.integers(0, 700), max_size=3).map(tuple),
        st.sampled_from(["F32", "BF16", "U8", "I64"]),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(tables, st.integers(1, 9), st.integers(1, 3), st.sampled_from([3 * CHECKSUM_BLOCK, 10**9]))
def test_every_byte_is_written_once(
    table: list[tuple[str, tuple[int, ...], str]], ranks: int, nodes: int, max_file_size: int
) -> None:
    rows = tuple(whole(group, f"t{i}", shape, dtype) for i, (group, shape, dtype) in enumerate(table))
    held = [Holding(rows, tuple(range(ranks)))]
    node_of = [rank * nodes // ranks for rank in range(ranks)]
    plan = plan_save(held, node_of, SAVE, max_file_size=max_file_size)
    check_every_byte_once(plan, ranks)
    assert sum(plan.loads) == sum(row.nbytes for row in rows)
    assert {(f.group, t.name) for f in plan.files for t in f.tensors} == {(row.group, row.name) for row in rows}
    for file in plan.files:
        assert len({node_of[share.rank] for share in file.shares}) == 1
        assert file.data_size <= max_file_size or len(file.tensors) == 1
        sizes = {tensor.name: tensor.slice.numel for tensor in file.tensors}
        digests = {tensor.name: ["0" * 16] * len(tensor.checksum_blocks()) for tensor in file.tensors}
        header = Header(file.header_size, 10**15, SAVE, file.tensors, digests)
        assert {t.name: t.slice.numel for t in parse_header(header.to_bytes(), file.size).tensors} == sizes


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_replicas_of_a_node_write_the_same_number_of_bytes(ranks: int) -> None:
    rows = [whole("model", f"p{i}", (1000 + 37 * i, 1000), "BF16") for i in range(40)]
    rows += [whole("optimizer/o", f"p{i}/{key}", (1000 + 37 * i, 1000)) for i in range(40) for key in ("m", "v")]
    rows += [whole("optimizer/o", f"p{i}/step", ()) for i in range(40)]
    plan = plan_save([Holding(tuple(rows), tuple(range(ranks)))], [0] * ranks, SAVE)
    loads = check_every_byte_once(plan, ranks)
    assert max(loads) - min(loads) <= 0.05 * sum(loads) / ranks


def test_unsharded_tensors_are_divided_among_nodes() -> None:
    rows = tuple(whole("model", f"p{i}", (100 * (i + 1), 1000)) for i in range(40))
    nodes = [rank // 4 for rank in range(16)]
    plan = plan_save([Holding(rows, tuple(range(16)))], nodes, SAVE)
    loads = check_every_byte_once(plan, 16)
    assert len(plan.files) == 4
    assert max(loads) - min(loads) <= 0.05 * sum(loads) / 16 + CHECKSUM_BLOCK


@given(st.lists(st.text(max_size=600), max_size=60), st.integers(1, 20))
def test_no_file_has_more_tensors_than_its_header_takes(names: list[str], limit: int) -> None:
    """A long name counts for several."""
    rows = [whole("model", f"{number}.{name}", (3,), "U8") for number, name in enumerate(names)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepmark.checkpoint.save.plan.MAX_TENSORS", limit)
        plan = plan_save([Holding(tuple(rows), (0,))], [0], SAVE)
    assert sorted(tensor.name for file in plan.files for tensor in file.tensors) == sorted(row.name for row in rows)
    for file in plan.files:
        assert sum(1 + len(tensor.name) // 128 for tensor in file.tensors) <= limit or len(file.tensors) == 1


def test_shards_go_to_files_of_their_own_replicas() -> None:
    """Tensor parallel 2 by data parallel 2: halves are shared by those that hold them, the rest by all."""
    held = []
    for half in range(2):
        rows = [
            SliceRecord("model", "w", "F32", (8, 4), TensorSlice.of_box((4 * half, 0), (4, 4))),
            whole("model", "norm", (4,)),
        ]
        rows.append(
            SliceRecord("optimizer/o", "w/m", "F32", (8, 4), TensorSlice.of_range((8, 4), 16 * half, 16 * half + 16))
        )
        held.append(Holding(tuple(rows), (half, half + 2)))
    plan = plan_save(held, [0] * 4, SAVE)
    check_every_byte_once(plan, 4)
    files = {(file.group, tuple(t.name for t in file.tensors), file.finalizer) for file in plan.files}
    assert len(files) == 5
    assert {names for group, names, _ in files if group == "model"} == {("w",), ("norm",)}


def test_several_shards_of_a_tensor_on_a_rank_go_to_several_files() -> None:
    rows = tuple(SliceRecord("model", "qkv", "F32", (4, 6), TensorSlice.of_box((0, 2 * i), (4, 2))) for i in range(3))
    plan = plan_save([Holding(rows, (0,))], [0], SAVE)
    assert len(plan.files) == 3
    check_every_byte_once(plan, 1)


def test_holes_and_overlaps_and_disagreement_are_refused() -> None:
    half = SliceRecord("model", "w", "F32", (8,), TensorSlice.of_range((8,), 0, 4))
    more = SliceRecord("model", "w", "F32", (8,), TensorSlice.of_range((8,), 2, 8))
    with pytest.raises(UsageError, match="tensor 'w' is incomplete: the ranks' shards cover only 4 of 8 elements"):
        plan_save([Holding((half,), (0,))], [0], SAVE)
    with pytest.raises(UsageError, match="overlap, with 10 of 8"):
        plan_save([Holding((half,), (0,)), Holding((more,), (1,))], [0, 0], SAVE)
    other = SliceRecord("model", "w", "F32", (9,), TensorSlice.full((9,)))
    with pytest.raises(UsageError, match="all ranks have to save the same tensor"):
        plan_save([Holding((half,), (0,)), Holding((other,), (1,))], [0, 0], SAVE)


@given(st.integers(0, 5 * CHECKSUM_BLOCK), st.integers(0, 5 * CHECKSUM_BLOCK), st.data())
def test_checksum_blocks_cover_their_range(begin: int, length: int, data: st.DataObject) -> None:
    found = checksum_blocks(begin, begin + length)
    assert [a for a, _ in found] + [begin + length] * bool(found) == [begin] * bool(found) + [b for _, b in found]
    assert all(b % CHECKSUM_BLOCK == 0 for _, b in found[:-1])
    if length:
        low = data.draw(st.integers(begin, begin + length - 1))
        high = data.draw(st.integers(low + 1, begin + length))
        expected = [(n, a, b) for n, (a, b) in enumerate(found) if a < high and b > low]
        assert covering_blocks(begin, begin + length, low, high) == expected


def large_world(ranks: int, tensors: int, tensor_parallel: int) -> list[Holding]:
    """Tables of a model sharded `tensor_parallel` ways, and of ZeRO-1 optimizer states over the rest of the ranks."""
    data_parallel = ranks // tensor_parallel
    shape = (4096, 1024)
    local = (shape[0] // tensor_parallel, shape[1])
    per_tensor = math.prod(local)
    held = []
    for t in range(tensor_parallel):
        box = TensorSlice.of_box((t * local[0], 0), local)
        model = tuple(SliceRecord("model", f"layers.{i}.weight", "BF16", shape, box) for i in range(tensors))
        members = tuple(range(t, ranks, tensor_parallel))
        held.append(Holding(model, members))
        total = per_tensor * tensors
        for d, rank in enumerate(members):
            first, last = total * d // data_parallel, total * (d + 1) // data_parallel
            rows = []
            for i in range(first // per_tensor, -(-last // per_tensor)):
                start, stop = max(0, first - i * per_tensor), min(per_tensor, last - i * per_tensor)
                tensor_slice = TensorSlice(box.box, start, stop)
                rows += [
                    SliceRecord("optimizer/optimizer", f"layers.{i}.weight/{key}", "F32", shape, tensor_slice)
                    for key in ("master", "exp_avg", "exp_avg_sq")
                ]
            held.append(Holding(tuple(rows), (rank,)))
    return held


@pytest.mark.parametrize(("ranks", "tensors", "tensor_parallel"), [(256, 100, 8), (4096, 1000, 8)])
def test_the_manifest_grows_with_tensors_and_files(ranks: int, tensors: int, tensor_parallel: int) -> None:
    plan = plan_save(large_world(ranks, tensors, tensor_parallel), [rank // 8 for rank in range(ranks)], SAVE)
    check_every_byte_once(plan, ranks)
    from stepmark.checkpoint.format.manifest import FileEntry

    files = tuple(
        FileEntry(file.name, file.size, "0" * 32, file.header_size, tuple((s.rank, s.end) for s in file.shares))
        for file in plan.files
    )
    manifest = Manifest(1, SAVE, 0.0, {}, ranks, {}, False, {}, files, tensor_entries(plan))
    data = manifest.to_bytes()
    assert len(data) < 20_000_000
    rows = sum(len(entry.slices) for group in manifest.tensors.values() for entry in group.values())
    assert len(data) < 300 * (len(files) + rows)
    assert parse_manifest(data).tensors == manifest.tensors
    assert json.loads(data)["step"] == 1


def test_planning_looks_at_each_row_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the ranks with twice the rows are twice the work: counted, not timed."""

    def work(ranks: int, tensors: int) -> tuple[int, int]:
        held = large_world(ranks, tensors, 4)
        rows = sum(len(holding.rows) for holding in held)
        count = 0
        numel = TensorSlice.numel.fget
        assert numel is not None

        def counted(tensor_slice: TensorSlice) -> int:
            nonlocal count
            count += 1
            return int(numel(tensor_slice))

        with monkeypatch.context() as patch:
            patch.setattr(TensorSlice, "numel", property(counted))
            plan_save(held, [rank // 8 for rank in range(ranks)], SAVE)
        return count, rows

    for ranks, tensors in [(32, 50), (64, 100), (128, 200)]:
        count, rows = work(ranks, tensors)
        assert count < 8 * rows


def test_ranges_of_thousands_of_ranks_are_compared_with_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = 4000
    boxes = [Box((i, 0), (1, 8)) for i in range(ranges)]
    count = 0
    intersect = Box.intersect

    def counted(one: Box, other: Box) -> Box | None:
        nonlocal count
        count += 1
        return intersect(one, other)

    monkeypatch.setattr(Box, "intersect", counted)
    assert disjoint(boxes)
    assert count <= 2 * ranges
    assert not disjoint([*boxes, Box((17, 3), (2, 2))])


def row(name: str, numel: int, *, dtype: str = "F32", first: bool = False) -> SliceRecord:
    return SliceRecord("model", name, dtype, (numel,), TensorSlice.full((numel,)), first)


@pytest.mark.parametrize("nodes", [[0, 0, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0]])
def test_the_first_rank_writes_all_of_them(nodes: list[int]) -> None:
    rows = []
    for layer in range(6):
        rows.append(row(f"{layer}.weight", 3_000_000))
        rows.append(row(f"{layer}.mean", 300_000, first=True))
        rows.append(row(f"{layer}.count", 1, dtype="I64", first=True))
    plan = plan_save([Holding(tuple(rows), (0, 1, 2, 3))], nodes, "s")
    loads = check_every_byte_once(plan, 4)
    assert max(loads) - min(loads) <= 0.2 * sum(loads) / 4 + CHECKSUM_BLOCK
    for file in plan.files:
        for tensor in file.tensors:
            writers = {s.rank for s in file.shares if s.begin < tensor.end and tensor.begin < s.end}
            assert "weight" in tensor.name or writers == {0}, tensor.name
        assert len({"weight" in tensor.name for tensor in file.tensors}) == 1  # each kind has its files
    assert sum(len(file.tensors) for file in plan.files) == len(rows)


def test_one_rank_has_one_file() -> None:
    plan = plan_save([Holding((row("weight", 10), row("mean", 10, first=True)), (0,))], [0], "s")
    assert [file.name for file in plan.files] == ["model.safetensors"]


@pytest.mark.parametrize(
    "name", ["layers.0.weight", "layers.0.weight" * 9, "\U0001f600" * 120, '"\\' * 60, "\x00é" * 500]
)
def test_a_full_file_has_a_header_that_others_read(name: str) -> None:
    """Of the largest number of tensors with such names: measured for a hundredth of them."""
    names = [f"{name}{index}" for index in range(planning.MAX_TENSORS + 1)]
    plan = plan_save([Holding(tuple(row(name, 5) for name in names), (0,))], [0], "s")
    assert len(plan.files) > 1
    assert sum(len(file.tensors) for file in plan.files) == len(names)
    largest = max(plan.files, key=lambda file: len(file.tensors))
    sample = largest.tensors[: len(largest.tensors) // 100]
    assert 100 * header_size(sample, "s") < 100_000_000
