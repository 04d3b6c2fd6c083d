from par_checkpoint.transfer.exchange import ReusedBuffer


def test_a_buffer_is_the_same_memory_again_until_more_is_needed():
    buffer = ReusedBuffer()
    first = buffer.of(100)
    assert first.numel() == 100
    assert buffer.of(60).data_ptr() == first.data_ptr()
    assert buffer.of(60).numel() == 60
    assert buffer.of(200).numel() == 200
    assert buffer.of(100).data_ptr() == buffer.of(200).data_ptr()
