"""Policies say at once what is wrong with them."""

import pytest

from par_recompute import Drop, Keep, Layers, Ops, checkpoint_layers


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Layers(0), ValueError, "every is 0; give 1 for every layer, or more"),
        (lambda: Drop("norm"), TypeError, "which is 'norm'; give a function of a module's name and the module"),
        (lambda: Keep("6 gigabytes"), ValueError, "budget='6 gigabytes': a size is a number and one of B, KB, MB"),
        (lambda: Keep("much"), ValueError, "budget='much': a size is a number and one of B, KB, MB"),
        (lambda: Keep(1.5), ValueError, "budget is 1.5; a part is from 0.0 to 1.0, and bytes are an int"),
        (lambda: Keep(-1), ValueError, "budget is -1 bytes; give 0 or more"),
        (lambda: Keep([]), TypeError, r"budget is \[\]; give bytes, a text such as '6GB', or a part such as 0.4"),
        (lambda: Keep(True), TypeError, "budget is True; give bytes"),
        (lambda: Ops("mm"), TypeError, "save is 'mm'; give a list of operations of torch.ops, or a function of them"),
        (lambda: Ops(3), TypeError, "save is 3; give a list of operations"),
    ],
)
def test_what_is_wrong_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("budget", "expected"), [("6GB", 6 * 10**9), ("1.5MiB", 3 * 2**19), ("12 B", 12), (0.25, 250), (7, 7), (0, 0)]
)
def test_a_budget_is_bytes_or_a_part(budget, expected):
    assert Keep(budget).bytes_of(1000) == expected


def test_editors_show_every_option(capsys):
    help(checkpoint_layers)
    shown = capsys.readouterr().out
    for option in ("policy:", "layers:", "example:", '"cheap"', "Layers(every=2)", 'Keep("6GB")'):
        assert option in shown
