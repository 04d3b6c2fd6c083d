"""The causal loss of full logits."""

import torch
from torch.nn import functional

from par_layers.pretrained import causal_lm_loss


def test_causal_lm_loss_counts_the_tokens_after_the_first():
    logits, ids = torch.randn(2, 5, 11), torch.randint(11, (2, 5))
    labels = ids.clone()
    labels[0, :3] = -100
    total, count = causal_lm_loss(logits, {"input_ids": ids, "labels": labels})
    expected = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert int(count) == 6
    assert torch.allclose(total / count, expected)
    again, of_all = causal_lm_loss(logits, {"input_ids": ids})
    assert int(of_all) == 8
    assert again > total
