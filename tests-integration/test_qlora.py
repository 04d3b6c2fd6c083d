"""QLoRA: adapters of peft on weights that bitsandbytes has packed in 4 bits, trained as on one device."""

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from par_layers import parallelization_of
from par_train import Strategy

from .test_strategy_adapters import CUT, SEQUENCE, TEXT, TOLERANCE, assert_near, batches, lora, train, train_plainly

transformers = pytest.importorskip("transformers", minversion="5.4")
peft = pytest.importorskip("peft", minversion="0.21")
bitsandbytes = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # peft asks by the older name

BLOCKS = {"hidden_size": 128, "intermediate_size": 128, "pad_token_id": 0}
"""Sizes of which half is a block of 64."""


def bare(storage=torch.uint8, family="Llama", seed=0, double=False, **sizes):
    """A model whose linears in layers have nf4 weights."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**TEXT, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    kind = {"quant_type": "nf4", "quant_storage": storage, "compress_statistics": double}
    for name, linear in list(model.model.named_modules()):
        if isinstance(linear, torch.nn.Linear):
            packed = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, **kind)
            packed.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, **kind)
            parent, _, child = name.rpartition(".")
            setattr(model.model.get_submodule(parent), child, packed)
    model.is_loaded_in_4bit = True  # peft then wraps the linears of bitsandbytes in classes of their own
    return model.to("cpu")


def quantized(adapter=None, **options):
    """Such a model with adapters around some of its linears."""
    adapted = peft.get_peft_model(bare(**options), lora() if adapter is None else adapter)
    torch.manual_seed(3)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.05)  # with zeros, B's gradient alone is not zero
    return adapted


def initialized(strategy, model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return strategy.initialize(model, torch.optim.SGD(trained, lr=0.3, momentum=0.9))


def one_process(model):
    """Losses and adapters after some steps."""
    losses = train_plainly(model)
    return losses, peft.get_peft_model_state_dict(model)


def of_base(model):
    return {key: each for key, each in model.named_parameters() if "base_layer" in key}


QLORA = {
    "stage 2": ({"zero": 2}, torch.uint8, TOLERANCE),
    "stage 3": ({"zero": 3}, torch.bfloat16, TOLERANCE),
    # A cast of the weights would change their codes, and another loss would differ by more than 1%.
    "stage 3, bf16": ({"zero": 3, "precision": "bf16"}, torch.float32, 1e-3),
}
NOT_QLORA = [
    (
        {"zero": 3},
        ValueError,
        r"q_proj.* has dtype torch\.uint8, .* or load it with bnb_4bit_quant_storage",
    ),
    (
        {"parallel": {"tensor": CUT}},
        ValueError,
        r"q_proj.base_layer.weight': a rank would have 32 of the 32 weights .* blocks of 64, .*llm_int8_skip_modules",
    ),
    (
        {"parallel": {"tensor": CUT}, "numerics": "canonical", "lanes": {"data": 2, "tensor": 2}},
        ValueError,
        "_proj.*' has a weight that bitsandbytes has packed, whose matmul has no form in lanes",
    ),
    ({"parallel": {"pipeline": 2}, "pipeline": {"microbatches": 2}}, ValueError, "a PeftModel cannot be split into p"),
]


@pytest.mark.ranks(2, timeout=240)
def test_qlora_of_bitsandbytes_trains_as_on_one_device(tmp_path):
    reference = quantized()
    losses, adapters = one_process(reference)
    for name, (options, storage, tolerance) in QLORA.items():
        with Strategy(**options, seed=3) as strategy:
            model, optimizer = initialized(strategy, quantized(storage=storage))
            if name == "stage 3":
                bytes_here = sum(each.nbytes for key, each in model.named_parameters() if "base_layer" in key)
                codes = [each for key, each in reference.named_parameters() if "base_layer" in key]
                assert bytes_here * 2 == sum(each.nbytes for each in codes)
            assert train(strategy, model, optimizer, stop=1) == pytest.approx(losses[:1], rel=tolerance), name
            checkpoints = strategy.checkpoints(tmp_path / name / "run", plan="peft")
            checkpoints.save(1)
            for call in (
                lambda: strategy.save(model, tmp_path / "no", plan="merged"),  # noqa: B023 - called below
                lambda: strategy.checkpoint(tmp_path / "no", step=1),
            ):
                with pytest.raises(ValueError, match=r"q_proj.* are codes of bitsandbytes, .* plan='peft'"):
                    call()
                assert not (tmp_path / "no").exists()
        with Strategy(**options, seed=4) as strategy:
            model, optimizer = initialized(strategy, quantized(storage=storage))
            assert strategy.checkpoints(tmp_path / name / "run", plan="peft").resume() == 1
            assert train(strategy, model, optimizer, first=1) == pytest.approx(losses[1:], rel=tolerance), name
            strategy.save(model, tmp_path / name / "adapters", plan="peft")
            if dist.get_rank() == 0 and "bf16" not in name:
                saved = safetensors.torch.load_file(tmp_path / name / "adapters" / "adapter_model.safetensors")
                assert_near(saved, adapters)


@pytest.mark.ranks(2, timeout=120)
def test_quantized_weights_that_cannot_be_sharded_raise():
    for options, error, message in NOT_QLORA:
        model = quantized(**({**BLOCKS, "vocab_size": 128} if "numerics" in options else {}))
        before = {name: (each.data_ptr(), each.shape) for name, each in model.named_parameters()}
        with Strategy(**options) as strategy, pytest.raises(error, match=message):
            initialized(strategy, model)
        assert before == {name: (each.data_ptr(), each.shape) for name, each in model.named_parameters()}


def shapes_saved(model):
    """Shapes of the tensors that autograd saves in a forward."""
    saved = set()

    def pack(tensor):
        saved.add(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.train()(**next(batches())).loss.backward()
    return saved


CUTS = {
    "tensor": (CUT, {}),
    "tensor, scales packed": (CUT, {"double": True, "storage": torch.float16}),
    "sequence parallel, fused": (SEQUENCE, {"family": "Phi3"}),
    "tensor, DoRA": (CUT, {"adapter": lora(use_dora=True), "double": True}),
}


@pytest.mark.ranks(2, timeout=240)
def test_qlora_over_tensor_ranks_equals_one_process(tmp_path):
    for name, (cut, options) in CUTS.items():
        made = {**BLOCKS, **options}
        adapter = made.pop("adapter", lora(target_modules="all-linear"))
        reference = quantized(adapter, **made)
        whole = {key: bitsandbytes.functional.dequantize_4bit(each.data, each.quant_state).clone()
                 for key, each in of_base(reference).items()}  # fmt: skip
        losses, adapters = one_process(reference)
        with Strategy(parallel={"tensor": cut}, seed=3) as strategy:
            # The other rank has another model, whose codes and scales must both be replaced by the first rank's.
            model, optimizer = initialized(strategy, quantized(adapter, **made, seed=dist.get_rank()))
            for key, each in of_base(model).items():
                part = bitsandbytes.functional.dequantize_4bit(each.data, each.quant_state)
                boxes, ratio = each.par_sharding.boxes, whole[key].shape[1] // each.par_sharding.shape[1]
                pieces = [
                    whole[key][rows, columns.start * ratio : columns.stop * ratio]
                    for rows, columns in (box.slices for box in boxes)
                ]
                assert torch.equal(part, torch.cat(pieces)), (name, key)  # the same bits
                assert part.numel() * 2 == whole[key].numel()
                assert each.quant_state.absmax.numel() * 64 == part.numel()
            saved = shapes_saved(model)
            optimizer.zero_grad()
            shapes = {tuple(each.quant_state.shape) for each in of_base(model).values()}
            assert not shapes.intersection(saved), "a dequantized weight was kept for backward"
            assert train(strategy, model, optimizer) == pytest.approx(losses, rel=TOLERANCE), name
            strategy.save(model, tmp_path / name, plan="peft")
            assert len({tuple(each.shape) for each in of_base(model).values()}) > 1
            assert "summed over" in parallelization_of(model).describe()
        if dist.get_rank() == 0:
            assert_near(safetensors.torch.load_file(tmp_path / name / "adapter_model.safetensors"), adapters)
            opened = peft.PeftModel.from_pretrained(bare(**made), tmp_path / name)
            assert_near(peft.get_peft_model_state_dict(opened), adapters)
        dist.barrier()


@pytest.mark.ranks(4, timeout=240)
def test_qlora_over_tensor_ranks_at_stage_3_equals_one_process(tmp_path):
    for name, adapter in {"LoRA": lora(), "DoRA": lora(use_dora=True)}.items():
        losses, adapters = one_process(quantized(**BLOCKS, double=True, adapter=adapter))
        with Strategy(parallel={"tensor": CUT}, zero=3, seed=3) as strategy:
            other = quantized(**BLOCKS, double=True, adapter=adapter, storage=torch.bfloat16, seed=dist.get_rank())
            model, optimizer = initialized(strategy, other)
            # In eval mode, bitsandbytes would pack the codes again on a CPU with AVX-512 for bf16.
            with torch.no_grad():
                assert model.eval()(**next(batches())).loss.item() == pytest.approx(losses[0], rel=TOLERANCE)
            assert train(strategy, model, optimizer) == pytest.approx(losses, rel=TOLERANCE), name
            strategy.save(model, tmp_path / name, plan="peft")
            codes = sum(each.nbytes for each in of_base(model).values())
        if dist.get_rank() == 0:
            assert_near(safetensors.torch.load_file(tmp_path / name / "adapter_model.safetensors"), adapters)
            assert codes * 4 == sum(each.nbytes for each in of_base(quantized(**BLOCKS)).values())
        dist.barrier()


@pytest.mark.ranks(2, timeout=120)
def test_weights_packed_for_inference_are_refused():
    model = quantized(**BLOCKS)
    for weight in of_base(model).values():
        weight.quant_state.packing_format_for_cpu = True  # as after a forward in eval mode with AVX-512 for bf16
    with (
        Strategy(parallel={"tensor": CUT}) as strategy,
        pytest.raises(
            TypeError, match=r"q_proj.base_layer.weight' has the layout .* CPU, .* load the model again, and shard it"
        ),
    ):
        initialized(strategy, model)
