"""Ranks with different versions of these packages say so, all of them, before they work together."""

import pytest
import torch.distributed as dist

import par_groups
from par_groups import ProcessGroups, Topology
from par_groups.live import process_groups as _process_groups
from par_groups.live.versions import clash, versions


def test_who_has_what():
    old, new = {"par-groups": "0.1.0", "par-zero": "0.1.0"}, {"par-groups": "0.1.0", "par-zero": "0.2.0"}
    assert clash([old, old]) is None
    assert clash([old, {"par-groups": "0.1.0", "par-train": "0.1.0"}, {}]) is None
    words = "different versions of par-zero: 0.1.0 on ranks [0, 2, 3, 4]..., 0.2.0 on ranks [1]; install the same one"
    assert words in clash([old, new, *[old] * 5])


def test_clash_covers_every_package_that_exchanges_samples_or_reports():
    for name in ("par-data", "par-diagnosis", "par-plan"):
        assert f"different versions of {name}: 1" in clash([{name: "1"}, {name: "2"}])


def test_what_is_imported_counts_or_else_what_is_installed(monkeypatch):
    assert versions()["par-groups"] == par_groups.__version__
    monkeypatch.setattr(par_groups, "__version__", "7")
    assert versions()["par-groups"] == "7"


@pytest.mark.ranks(3)
def test_different_versions_are_named_on_every_rank(monkeypatch):
    here = par_groups.__version__
    if dist.get_rank() == 1:
        monkeypatch.setattr(par_groups, "__version__", "9.9")
    words = rf"different versions of par-groups: {here} on ranks \[0, 2\], 9.9 on ranks \[1\]; install the same one"
    with pytest.raises(ValueError, match=words):
        ProcessGroups(Topology({"data": 3}))


@pytest.mark.ranks(2)
def test_a_rank_without_a_package_that_another_has_works_with_it(monkeypatch):
    if dist.get_rank() == 1:
        monkeypatch.setattr(_process_groups, "versions", lambda: {"par-groups": par_groups.__version__})
    with ProcessGroups(Topology({"data": 2})) as groups:
        assert groups.size("data") == 2
