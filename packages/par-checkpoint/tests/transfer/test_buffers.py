import pytest

from par_checkpoint.transfer.buffers import Buffer, Pool


def test_a_buffer_is_the_same_memory_again_until_more_is_needed():
    buffer = Buffer()
    first = buffer.of(100)
    assert first.numel() == 100
    assert buffer.of(60).data_ptr() == first.data_ptr()
    assert buffer.of(60).numel() == 60
    assert buffer.of(200).numel() == 200
    assert buffer.of(100).data_ptr() == buffer.of(200).data_ptr()


def test_a_pool_gives_what_was_given_back_and_else_new_memory():
    pool = Pool(64)
    one, other = pool.take(), pool.take()
    assert one.numel() == other.numel() == 64
    assert one.data_ptr() != other.data_ptr()
    pool.give_back(one)
    assert pool.take() is one


def test_what_is_lent_comes_back_after_an_error():
    pool = Pool(64)
    with pytest.raises(ValueError, match="inside"), pool.lent() as lent:
        raise ValueError("inside")
    assert pool.take() is lent
