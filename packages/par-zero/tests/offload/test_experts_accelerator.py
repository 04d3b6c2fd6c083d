"""Offload of experts from an accelerator, whose exchanges of rows share the device with copies over the link."""

import pytest

from par_testing import Accelerator, for_each, storm
from par_testing.accelerator.by_default import ByDefault
from par_zero import Offload

from .test_experts import assert_same_weights, together

HOST = {"optimizer": "host"}
CASES = (
    (0, HOST),
    storm((1, HOST)),
    (2, {"optimizer": {"host": 0.3, "disk": 0.4}}),
    (3, HOST),
    (3, {**HOST, "parameters": "host"}),
)


@for_each(case=CASES)
@pytest.mark.ranks(2, backend="strict", accelerator=Accelerator())
def test_experts_on_the_host_of_a_device_change_no_number(case, tmp_path):
    stage, given = case
    with ByDefault():
        plain, *_ = together(2, True, stage, None)
        found, most, _ = together(2, True, stage, Offload(path=tmp_path, piece=256, **given))
        # The state is on the host with offload.
        assert_same_weights(*({name: value.cpu() for name, value in each.items()} for each in (found, plain)))
        assert most["host"]
