"""Memory for copies: how parts lie in chunks, and how little of it torch rounds up."""

from unittest import mock

import pytest
import torch

from par_checkpoint import release_memory, save
from par_checkpoint.transfer import chunks
from par_checkpoint.transfer.chunks import CHUNK, Chunks, chunk_sizes
from par_checkpoint.transfer.sessions import session_of


def pinned(sizes):
    """Bytes that torch's allocator of pinned memory takes for chunks: the next power of two of each."""
    return sum(1 << (size - 1).bit_length() for size in sizes)


@pytest.mark.parametrize("total", [17 * 10**9, 5 << 20, 300 << 20, 33 * 10**9 + 7])
def test_hardly_more_is_pinned_than_is_copied(total):
    block = 4 << 20
    sizes = [block] * (total // block) + [total % block] * (total % block > 0)
    assert total <= pinned(chunk_sizes(sizes)) <= 1.02 * total + 2 * block
    assert max(chunk_sizes(sizes)) <= CHUNK


@pytest.mark.parametrize("seed", range(20))
def test_parts_lie_whole_and_aligned_and_do_not_meet(seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 5000, (60,), generator=generator).tolist()
    with mock.patch.object(chunks, "CHUNK", 8192):
        memory = Chunks(pinned=False)
        parts = list(memory.split(sizes))
        assert [part.numel() for part in parts] == sizes
        for number, part in enumerate(parts):
            part.fill_(number)
        assert all(bool((part == number).all()) for number, part in enumerate(parts))
        assert all(part.data_ptr() % 64 == 0 for part in parts if part.numel())
        again = [part.data_ptr() for part in memory.split(sizes)]
        assert again == [part.data_ptr() for part in parts]
        fewer = [part.data_ptr() for part in memory.split(sizes)]
        assert fewer == again[: len(fewer)]


def test_a_part_that_is_larger_than_a_chunk_has_one_for_itself():
    assert chunk_sizes([5, CHUNK + 1, 5])[1] == 2 * CHUNK
    assert chunk_sizes([]) == []
    assert chunk_sizes([0]) == [1]


def test_what_was_copied_into_is_released_and_made_anew(tmp_path):
    model = {"w": torch.ones(3 << 20)}
    save(tmp_path / "a", model=model, async_=True).wait()
    kept = session_of(None)._memory
    assert sum(chunk.numel() for chunk in kept.memory) >= 12 << 20
    handle = save(tmp_path / "again", model=model, async_=True)
    release_memory()
    assert handle.done()  # it is waited for
    assert kept.memory == []
    assert session_of(None)._memory is None
    release_memory()  # again is harmless
    save(tmp_path / "b", model=model, async_=True).wait()


def test_the_cache_of_pinned_memory_is_emptied_too():
    memory = Chunks(pinned=True)
    with mock.patch.object(chunks, "empty_pinned_cache") as emptied:
        memory.release()
    assert emptied.call_count == 1


def test_an_error_is_still_raised_after_a_release(tmp_path):
    (tmp_path / "a").mkdir()
    with mock.patch("par_checkpoint.transfer.write.crc32c", side_effect=OSError(28, "No space left on device")):
        handle = save(tmp_path / "b", model={"w": torch.ones(3)}, async_=True)
        release_memory()
    with pytest.raises(OSError, match="No space left"):
        handle.wait()
