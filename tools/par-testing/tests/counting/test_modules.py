import base64
import json
import quopri
import reprlib
import threading
from json.decoder import JSONDecoder

import torch

from par_testing import modules_called


def test_modules_are_listed_in_the_order_of_their_first_call():
    with modules_called("json") as names:
        json.loads("[1]")
        json.dumps({"a": 1}, indent=1)
        json.loads("[2]")
    assert names == ["json", "json.decoder", "json.encoder"]


def test_a_module_that_only_a_thread_calls_comes_last():
    with modules_called("json") as names:
        thread = threading.Thread(target=lambda: JSONDecoder().decode("[1]"))
        thread.start()
        thread.join()
        json.JSONEncoder(indent=1).encode([])
    assert names == ["json.encoder", "json.decoder"]


def test_other_packages_are_left_out_and_nothing_is_recorded_afterwards():
    with modules_called("jso") as names:
        json.loads("[1]")
    with modules_called("json") as later:
        pass
    json.loads("[1]")
    assert names == later == []


def test_only_functions_that_are_handed_a_tensor_or_its_bytes_count():
    tensor = torch.arange(16.0)
    text = tensor.numpy().tobytes().decode("latin1")
    with modules_called("json", "base64", "quopri", handed=tensor) as names:
        json.dumps(text)  # text is neither a tensor nor bytes
        base64.b64encode(tensor.numpy().tobytes())
        quopri.encodestring(b"other bytes")
    assert names == ["base64"]
    with modules_called("reprlib", handed=tensor) as names:
        reprlib.Repr().repr([tensor.view(4, 4)])  # a view, in a list
    assert names == ["reprlib"]
    with modules_called("reprlib", handed=tensor) as names:
        reprlib.Repr().repr([torch.zeros(3)])
    assert names == []
