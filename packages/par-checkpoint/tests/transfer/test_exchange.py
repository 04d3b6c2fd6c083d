from par_checkpoint.transfer.exchange import MessageWindow, ReusedBuffer


def test_a_buffer_is_the_same_memory_again_until_more_is_needed():
    buffer = ReusedBuffer()
    first = buffer.of(100)
    assert first.numel() == 100
    assert buffer.of(60).data_ptr() == first.data_ptr()
    assert buffer.of(60).numel() == 60
    assert buffer.of(200).numel() == 200
    assert buffer.of(100).data_ptr() == buffer.of(200).data_ptr()


class Transfer:
    """A message that notes when a rank waits for it."""

    def __init__(self, number, waited):
        self.number, self.waited = number, waited

    def wait(self):
        self.waited.append(self.number)


def test_message_window_waits_when_its_buffers_are_in_use():
    waited, ended = [], []
    window = MessageWindow(2)
    used = []
    for number in range(3):
        used.append(window.buffer(8).data_ptr())
        window.begin(Transfer(number, waited), uses_buffer=True, end=lambda number=number: ended.append(number))
    assert used[0] == used[2] != used[1]
    assert waited == ended == [0]
    window.begin(Transfer(3, waited), uses_buffer=False)
    assert waited == [0]  # a message from other memory needs no buffer
    window.finish()
    assert waited == [0, 1, 2, 3]
    assert ended == [0, 1, 2]


def test_message_window_limits_the_messages_under_way():
    waited = []
    window = MessageWindow(1)
    for number in range(100):
        window.begin(Transfer(number, waited), uses_buffer=False)
    assert 0 < len(waited) < 100
    assert waited == list(range(len(waited)))
