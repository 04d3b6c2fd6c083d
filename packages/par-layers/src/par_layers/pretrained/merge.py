"""The weights of a model into which its adapters are merged, sharded as the model is."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import agree, attributes, packed_weights, set_sharding, sharding_of

from .adapters import PREFIX, adapter_tensors, adapters_in, base_tensors, config_of


@torch.no_grad()
def merged_tensors(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return this rank's shards of a model's tensors, with the adapters merged into the weights. Collective.

    The model does not change: weights with an adapter are new tensors.

    Args:
        model: The model, or this rank's part of it.
        device: Device from which ranks send their shards.

    Raises:
        ValueError: The adapters are DoRA, around a bare parameter, such as packed experts, around packed weights, or
            next to modules that are trained in full.
    """
    if config_of(model).use_dora:
        raise ValueError(
            "the adapters are DoRA, which scales each full row of a weight, and no rank merges those; save them with "
            "plan='peft', open them with peft, and call merge_and_unload() there"
        )
    if getattr(config_of(model), "lora_bias", False):
        raise ValueError(
            "the adapters have lora_bias=True, and a bias of B is no part of a weight; save them with plan='peft', "
            "open them with peft, and call merge_and_unload() there"
        )
    # A shard is a set of rectangles of the weight, whatever the sharding is. Each rectangle needs some rows of B and
    # columns of A, so each rank gathers both matrices of one adapter at a time.
    bare = next((name for name, layer in adapters_in(model).items() if hasattr(layer, "parameter_name")), None)
    if bare is not None:
        raise ValueError(
            f"the adapter of {bare!r} is around a bare parameter, which no rank merges; save the adapters with "
            "plan='peft', open them with peft, and call merge_and_unload() there"
        )
    full = next((name for name in adapter_tensors(model) if ".lora_" not in name), None)
    if full is not None:
        raise ValueError(
            f"{full!r} is trained in full next to the adapters (modules_to_save), and no rank replaces the weight "
            "below it; save the adapters with plan='peft', open them with peft, and call merge_and_unload() there"
        )
    packed = next(iter(packed_weights(model)), None)
    if packed is not None:
        raise ValueError(
            f"the elements of {packed!r} are codes of bitsandbytes, to which no rank adds numbers; save the adapters "
            "with plan='peft', open them with peft on the model before quantization, and call merge_and_unload() there"
        )
    layers, tensors, own = adapters_in(model), base_tensors(model), adapter_tensors(model)
    mine = {key: (tuple(sharding_of(tensor).shape), tensor.dtype) for key, tensor in own.items()}
    known = {key: of for theirs in agree(None, mine, None).values() for key, of in theirs.items()}
    # `_whole` is collective: each rank goes through the adapters of all pipeline stages, in the same order.
    for key in sorted(key for key in known if ".lora_A." in key):
        names = key, key.replace(".lora_A.", ".lora_B.")
        down, up = (_whole(own.get(name), *known[name], device) for name in names)
        linear = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        if linear not in layers:  # it is on another stage
            continue
        layer, weight = layers[linear], tensors[f"{linear}.weight"]
        (scaling,) = layer.scaling.values()
        record, merged = sharding_of(weight), weight.detach().clone()
        for box in record.boxes:
            rows, columns = box.slices[::-1] if layer.fan_in_fan_out else box.slices
            delta = ((up[rows] @ down[:, columns]) * scaling).to(merged.device, known[key][1])
            box.of(merged).add_(delta.T if layer.fan_in_fan_out else delta)
        changed = nn.Parameter(merged, requires_grad=False)
        if attributes.SHARDING.is_on(weight):
            set_sharding(changed, record)
        tensors[f"{linear}.weight"] = changed
    return tensors


def _whole(part: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the full tensor of which ranks have shards or replicas, in fp32 at least. Two all-reduces of its size.

    Args:
        part: This rank's shard; None if it has none.
        shape: The shape of the full tensor.
        dtype: The dtype of the tensor.
        device: Device from which ranks send.
    """
    rank = dist.get_rank()
    values = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
    holders = torch.full(shape, dist.get_world_size(), dtype=torch.int32, device=device)
    for box in () if part is None else sharding_of(part).boxes:
        values[box.slices] = box.of(part.detach()).to(values)  # type: ignore[union-attr]  # there are no boxes of None
        holders[box.slices] = rank
    dist.all_reduce(holders, op=dist.ReduceOp.MIN)  # of several replicas, the one of the first rank counts
    values.masked_fill_((holders != rank), 0.0)
    dist.all_reduce(values)
    return values
