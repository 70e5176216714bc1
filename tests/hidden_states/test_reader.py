"""Reading: any sample and any slice, streams that share, repeat and resume, errors that name the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3.errors import Eagle3Error
from eagle3.hidden_states.reader import HiddenStateReader, HiddenStateSample
from tests.hidden_states.conftest import H, Make


@pytest.fixture
def reader(make: Make, tmp_path: Path) -> HiddenStateReader:
    make(tmp_path / "work", shards=3)
    return HiddenStateReader(sorted((tmp_path / "work").glob("*.safetensors")))


def same(one: HiddenStateSample, other: HiddenStateSample) -> bool:
    tensors = ("token_ids", "aux", "last", "last_rows")
    return one.id == other.id and all(torch.equal(getattr(one, name), getattr(other, name)) for name in tensors)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 21), st.integers(0, 630), st.integers(0, 630))
def test_a_slice_is_the_slice_of_the_whole(reader: HiddenStateReader, number: int, start: int, stop: int) -> None:
    whole = reader.read(number)
    part = reader.read(whole.id, start, stop)
    assert torch.equal(part.token_ids, whole.token_ids[start:stop])
    assert torch.equal(part.aux, whole.aux[start:stop])
    kept = (whole.last_rows >= start) & (whole.last_rows < stop)
    assert torch.equal(part.last_rows, whole.last_rows[kept])
    assert torch.equal(part.last, whole.last[kept])
    assert part.aux.shape[1:] == (3, H)
    bare = reader.read(whole.id, start, stop, aux=False)
    assert bare.aux.shape == (0, 3, H)
    assert torch.equal(bare.last, part.last)
    assert torch.equal(bare.token_ids, part.token_ids)


def test_rows_of_the_last_layer_are_found_by_position(reader: HiddenStateReader) -> None:
    sample = next(sample for sample in map(reader.read, reader.ids) if len(sample.last_rows) > 1)
    positions = sample.last_rows.flip(0).numpy()
    assert torch.equal(sample.last[sample.rows_at(positions)], sample.last.flip(0))
    with pytest.raises(Eagle3Error, match="lack last-layer rows") as caught:
        sample.rows_at(np.array([int(sample.last_rows.max()) + 1]))
    assert sample.id in str(caught.value)


def test_by_number_and_by_id(reader: HiddenStateReader) -> None:
    assert len(reader) == len(reader.ids) == 22
    assert "s04-0" in reader
    assert "s04-1" not in reader
    for number, sample in enumerate(reader.ids):
        assert same(reader.read(number), reader.read(sample))
        assert reader.tokens[number] == len(reader.read(number).token_ids)
    with pytest.raises(Eagle3Error, match="no hidden states") as caught:
        reader.read("unknown-7")
    assert "unknown-7" in str(caught.value)


@pytest.mark.parametrize("ahead_tokens", [1, 300, 10**6])
def test_a_stream_reads_every_sample_once(reader: HiddenStateReader, ahead_tokens: int) -> None:
    found = list(reader.stream(seed=3, ahead_tokens=ahead_tokens))
    assert [one.id for one in found] == reader.order(seed=3)
    assert sorted(one.id for one in found) == sorted(reader.ids)
    assert all(same(one, reader.read(one.id)) for one in found)


def test_the_order_follows_from_seed_and_epoch(reader: HiddenStateReader) -> None:
    orders = [reader.order(seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert reader.order(seed=1, epoch=1) == orders[3]
    # Taking samples out does not move the others.
    chosen = reader.ids[::2]
    assert reader.order(ids=chosen, seed=1) == [sample for sample in reader.order(seed=1) if sample in chosen]


def test_a_stream_goes_on_where_it_was_left(reader: HiddenStateReader) -> None:
    whole = [one.id for one in reader.stream(seed=2, rank=1, ranks=2)]
    for position in (0, 1, 5, len(whole)):
        assert [one.id for one in reader.stream(seed=2, rank=1, ranks=2, position=position)] == whole[position:]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_share_tokens_evenly_at_every_point(reader: HiddenStateReader, ranks: int) -> None:
    shares = [reader.order(seed=4, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert sorted(sample for share in shares for sample in share) == sorted(reader.ids)
    tokens = dict(zip(reader.ids, reader.tokens.tolist(), strict=True))
    loads = [sum(tokens[sample] for sample in share) for share in shares]
    assert max(loads) - min(loads) <= max(tokens.values())


def test_leaving_a_stream_early_stops_its_threads(reader: HiddenStateReader) -> None:
    import threading

    stream = reader.stream()
    next(stream)
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hidden-states")]


def test_shards_that_do_not_belong_together_are_refused(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "one")
    make(tmp_path / "other", aux_layer_ids=(1, 4, 5))
    one, other = tmp_path / "one" / "shard-0.safetensors", tmp_path / "other" / "shard-1.safetensors"
    with pytest.raises(Eagle3Error, match="different captures are mixed: their layer ids differs") as caught:
        HiddenStateReader([one, other])
    assert str(other) in str(caught.value)
    with pytest.raises(Eagle3Error, match="the same sample"):
        HiddenStateReader([one, tmp_path / "one" / "shard-1.safetensors", one])
    with pytest.raises(Eagle3Error, match="no hidden-state shards"):
        HiddenStateReader([])


def test_files_that_are_not_shards_are_named(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "work")
    data = (tmp_path / "work" / "shard-0.safetensors").read_bytes()
    path = tmp_path / "bad.safetensors"
    cases = {
        b"": "truncated",
        data[:7]: "truncated",
        data[:500]: "damaged",
        data[:-1]: "truncated",
        data + b"x": "too long",
        b"\xff" * 64: "damaged",
        data[:8] + b"[" + data[9:]: "damaged",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(Eagle3Error, match=message) as caught:
            HiddenStateReader([path])
        assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(Eagle3Error, match="missing"):
        HiddenStateReader([path])


def test_damage_is_noticed_when_the_sample_is_read(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "work", shards=1)
    path = tmp_path / "work" / "shard-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 4  # the last frame of the last sample
    path.write_bytes(data)
    reader = HiddenStateReader([path])
    with pytest.raises(Eagle3Error, match="hidden states are damaged") as caught:
        reader.read(reader.ids[-1])
    assert reader.ids[-1] in str(caught.value)
    assert "layer 8" in str(caught.value)
    assert len(reader.read(reader.ids[0]).token_ids) > 0
    with pytest.raises(Eagle3Error, match="hidden states are damaged"):
        list(reader.stream())


def test_threads_may_share_a_reader(reader: HiddenStateReader) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(reader.read, reader.ids * 4))
    assert all(same(one, reader.read(one.id)) for one in found)
    assert np.sum(reader.tokens) * 4 == sum(len(one.token_ids) for one in found)
