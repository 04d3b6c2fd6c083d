"""Vision-language models of transformers equal one device: at stage 3 with images on some ranks, over tensor ranks, and
in a pipeline, whose first stage has the encoder of images.

Over sequence ranks they are refused by name, or equal without images.
"""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology, sharding_of
from par_layers import verify_plan
from par_layers.pretrained import cut_dict, pretrained_of
from par_pipeline import PipelineError
from par_testing import Strict, count_collectives, for_each, keep_fp64
from par_train import Strategy
from par_zero import no_sync, shard, summon

transformers = pytest.importorskip("transformers")

IMAGE, WORDS = 39, 30
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def llava(name="Llava", **own):
    return getattr(transformers, f"{name}ForConditionalGeneration")(
        getattr(transformers, f"{name}Config")(
            vision_config=transformers.CLIPVisionConfig(**TOWER, image_size=8, patch_size=4),
            text_config=transformers.LlamaConfig(**TEXT),
            image_token_id=IMAGE,
            vision_feature_layer=-1,
            **own,
        )
    )


def gemma3():
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            vision_config=transformers.SiglipVisionConfig(**TOWER, image_size=8, patch_size=4),
            text_config=transformers.Gemma3TextConfig(**TEXT, head_dim=8),
            image_token_index=IMAGE,
            image_token_id=IMAGE,
            mm_tokens_per_image=4,
            boi_token_index=37,
            eoi_token_index=38,
        )
    )


def qwen3_vl():
    vision = {**TOWER, "depth": 2, "num_heads": 2, "out_hidden_size": 16, "patch_size": 4, "spatial_merge_size": 1}
    vision |= {"temporal_patch_size": 1, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    return transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(
            vision_config=vision,
            text_config={**TEXT, "head_dim": 8, "rope_parameters": rope},
            image_token_id=IMAGE,
            vision_start_token_id=37,
            vision_end_token_id=38,
        )
    )


MODELS = {"Llava": llava, "Gemma3": gemma3, "Qwen3-VL": qwen3_vl}


def batch(name, step, rank, with_image):
    """Two rows of text of this rank; the first has an image of four tokens if asked for."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, WORDS, (2, 9), generator=generator)
    given = {"input_ids": ids, "labels": ids.clone()}
    if name != "Llava":
        given |= {"mm_token_type_ids" if name == "Qwen3-VL" else "token_type_ids": torch.zeros_like(ids)}
    if with_image:
        ids[0, 2:6] = IMAGE
        for key in given.keys() & {"token_type_ids", "mm_token_type_ids"}:
            given[key][0, 2:6] = 1
        given["labels"][0, 2:6] = -100
        pixels = torch.randn(1, 3, 8, 8, generator=generator, dtype=torch.float64)
        if name == "Qwen3-VL":
            given |= {"pixel_values": pixels.reshape(4, 48), "image_grid_thw": torch.tensor([[1, 2, 2]])}
        else:
            given |= {"pixel_values": pixels}
    return given


STEPS = [(True, False), (False, True), (True, True), (False, False), (True, False)]
"""Which of two ranks has an image in each step: in the first, one rank alone."""


def check(name, ranks_with_image):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    shard(model, optimizer, stage=3, group=dist.group.WORLD)
    its = torch.optim.AdamW(reference.parameters(), lr=1e-3, eps=1e-3)
    for step, has_image in enumerate(ranks_with_image):
        mine = dist.get_rank()
        model(**batch(name, step, mine, has_image[mine])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses = [reference(**batch(name, step, rank, has)).loss for rank, has in enumerate(has_image)]
        (sum(losses) / len(losses)).backward()
        its.step()
        its.zero_grad()
    with summon(model):
        for (key, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}")


@for_each(name=MODELS)
@pytest.mark.ranks(2)
def test_images_on_some_ranks_equal_one_device(name):
    check(name, STEPS)


@pytest.mark.ranks(2, backend="strict", strict=Strict(slots=1))
def test_images_on_some_strict_ranks_equal_one_device():
    for name in MODELS:
        check(name, STEPS[:2])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
@pytest.mark.ranks(2, timeout=120)
def test_lora_on_the_language_model_equals_one_device(tmp_path):
    """The encoder of images is frozen, and images are on one rank only. PEFT opens what is saved."""
    peft = pytest.importorskip("peft")
    for name, axes in itertools.product(MODELS, ({"zero": 3}, {"parallel": {"tensor": {"size": 2, "mode": "1d"}}})):

        def adapted(name=name):
            torch.manual_seed(0)
            targets = r".*language_model.*(q_proj|o_proj|up_proj)"
            config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
            return peft.get_peft_model(MODELS[name](), config).double()

        is_sharded = "zero" in axes
        reference = adapted()
        reference(**(joined(name, (True, False)) if is_sharded else given_image(name))).loss.backward()
        with keep_fp64(), Strategy(**axes) as strategy:
            model = adapted()
            trained = [each for each in model.parameters() if each.requires_grad]
            plans = {model: QWEN3_VL} if name == "Qwen3-VL" and not is_sharded else {}
            model, optimizer = strategy.initialize(model, torch.optim.SGD(trained, lr=1.0), plans=plans)
            mine = batch(name, 0, dist.get_rank(), dist.get_rank() == 0) if is_sharded else given_image(name)
            strategy.execute_pipeline(iter([mine]), model, None, optimizer)
            optimizer.step()
            folder = tmp_path / f"{name}-{is_sharded}"
            strategy.save(model, folder, plan="peft")
            dist.barrier()
        torch.manual_seed(0)
        opened = peft.PeftModel.from_pretrained(MODELS[name]().double(), folder, is_trainable=True)
        after = {key: x for key, x in opened.named_parameters() if "lora_" in key}
        for key, parameter in reference.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, key
                assert "language_model" in key
                far = (after[key] - (parameter - parameter.grad)).abs().max()
                assert far < 1e-6, (name, axes, key, far)  # PEFT's files are in fp32 here


LAYERS = "model.language_model.layers.*"
QWEN3_VL = {
    **{f"{LAYERS}.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
    **{f"{LAYERS}.self_attn.{name}": "replicated_with_grad_allreduce" for name in ("q_norm", "k_norm")},
    **{f"{LAYERS}.mlp.{name}": "colwise" for name in ("gate_proj", "up_proj")},
    **{f"{LAYERS}.{name}": "rowwise" for name in ("self_attn.o_proj", "mlp.down_proj")},
}
"""transformers' own plan shards the head alone, and par says so."""


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def given_image(name, with_image=True):
    """A batch of a length that two ranks divide, with all tokens of the image."""
    return {key: x[:, :8] if x.shape[-1] == 9 else x for key, x in batch(name, 0, 0, with_image).items()}


@pytest.mark.ranks(2, timeout=120)
def test_vision_language_models_over_tensor_ranks_equal_one_device():
    for cuts_sequence in (False, True):
        tensor = {"size": 2, "mode": "1d", "sequence_parallel": cuts_sequence}
        with keep_fp64(), ProcessGroups(Topology.from_config({"tensor": tensor}, 2)) as groups:
            for name in MODELS:
                plan = QWEN3_VL if name == "Qwen3-VL" else "auto"
                for with_image in (True, False):
                    given = given_image(name, with_image)
                    compared = verify_plan(lambda name=name: made(name), groups, given, plan)
                    assert compared.worst < 1e-10, (name, with_image, cuts_sequence, compared)
            if cuts_sequence:  # features that enter behind the last layer, which has gathered the tokens
                with pytest.raises(ValueError, match=r"visual_pos_masks is \[2, 8\]: Qwen3VLTextModel changes"):
                    verify_plan(lambda: deepstack().double(), groups, given_image("Qwen3-VL"), QWEN3_VL)


def joined(name, has_image):
    """One batch of the rows of several; the first row of each has an image if asked for."""
    parts = [batch(name, 0, number, has) for number, has in enumerate(has_image)]
    return {key: torch.cat([each[key] for each in parts if key in each]) for each in parts for key in each}


def check_stages(name, has_image, microbatches=2, **parallel):
    given, reference, model = joined(name, has_image), made(name), made(name)
    given = {key: x[:, :8] if x.shape[-1] == 9 else x for key, x in given.items()}  # a length that ranks divide
    with (
        keep_fp64(),
        Strategy(parallel={"pipeline": 2, **parallel}, pipeline={"microbatches": microbatches}) as strategy,
    ):
        expected = reference(**given).loss
        expected.backward()
        # A step by the gradient itself.
        after = {key: x.detach() - (0 if x.grad is None else x.grad) for key, x in reference.named_parameters()}
        plans = {model: QWEN3_VL} if parallel and name == "Qwen3-VL" else {}
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), plans=plans)
        has_tower = any("vis" in key for key, _ in model.named_parameters())
        assert has_tower == (strategy.groups.rank("pipeline") == 0), "the tower is in the first stage"
        loss = strategy.execute_pipeline(iter([given]), model, None, optimizer)
        optimizer.step()
        assert abs(loss.item() - expected.item()) < 1e-10, (name, has_image)
        for key, parameter in model.named_parameters():
            for box in sharding_of(parameter).boxes:
                far = (box.of(parameter.detach()) - after[key][box.slices]).abs().max().item()
                assert far < 1e-10, (name, has_image, key)


@pytest.mark.ranks(2, timeout=120)
def test_vision_language_models_in_two_stages_equal_one_device():
    for name in MODELS:
        for has_image, microbatches in (((True, False), 2), ((True, True), 1), ((False, False), 2)):
            check_stages(name, has_image, microbatches)


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=120)
def test_vision_language_models_in_stages_over_tensor_ranks_equal_one_device():
    for name in MODELS:
        for cuts_sequence in (False, True):
            check_stages(name, (True, False), tensor={"size": 2, "mode": "1d", "sequence_parallel": cuts_sequence})


class OwnPositions(transformers.LlavaForConditionalGeneration):
    """A model whose code computes positions from an image, which a later stage does not have."""

    def forward(self, input_ids=None, pixel_values=None, **keywords):
        if pixel_values is not None:
            keywords["position_ids"] = torch.zeros_like(input_ids)
        return super().forward(input_ids=input_ids, pixel_values=pixel_values, **keywords)


def deepstack():
    config = qwen3_vl().config
    config.vision_config.deepstack_visual_indexes = [0, 1]
    return transformers.Qwen3VLForConditionalGeneration(config)


@pytest.mark.ranks(2, timeout=120)
def test_stages_that_would_lack_images_raise():
    with Strategy(parallel={"pipeline": 2}, pipeline={"microbatches": 2}) as strategy:
        for model, error, text in (
            (
                OwnPositions(llava().config),
                TypeError,
                r"encoder of images in 'model.vision_tower', .* receives another '(atten|pos)",
            ),
            (
                deepstack(),
                ValueError,
                r"adds features of images behind its first 2 layers \(deepstack\), .* has 1 layers;",
            ),
        ):
            before = {name: each.data_ptr() for name, each in model.named_parameters()}
            with pytest.raises(error, match=text):
                strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
            assert before == {name: each.data_ptr() for name, each in model.named_parameters()}
        model = made("Llava")
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
        given = joined("Llava", (True, True))
        given["input_ids"][0, 2], given["input_ids"][2, 7] = 1, IMAGE
        with pytest.raises(ValueError, match=r"have \[3, 5\] image placeholders, and images of \[4, 4\] do not fit"):
            strategy.execute_pipeline(iter([given]), model, None, optimizer)


@pytest.mark.ranks(2, timeout=120)
def test_split_sequences_refuse_images_by_name():
    with keep_fp64(), Strategy(parallel={"sequence": {"size": 2, "mode": "gather"}}) as strategy:
        for name in MODELS:
            with pytest.raises(
                ValueError, match=r"pixel_values is \[.*images have none; use the ranks of 'sequence' for"
            ):
                cut_dict(batch(name, 0, 0, with_image=True), strategy.context, compare=True)
        for name in ("Llava", "Qwen3-VL"):  # Gemma 3 asks for masks of images, and raises
            given, reference, model = batch(name, 0, 0, with_image=False), made(name), made(name)
            expected = reference(**given, use_cache=False).loss
            expected.backward()
            before = copy.deepcopy(model.state_dict())
            model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
            mine = cut_dict(given, strategy.context, compare=True)
            loss = strategy.execute_pipeline(iter([mine]), model, None, optimizer)
            optimizer.step()
            assert abs(loss.item() - expected.item()) < 1e-10, name
            for key, parameter in reference.named_parameters():
                gradient = 0.0 if parameter.grad is None else parameter.grad
                changed = before[key] - model.state_dict()[key]
                assert (changed - gradient).abs().max().item() < 1e-10, (name, key)


def without(key):
    return lambda given: given.pop(key)


def cut_short(given):
    given.update({key: tensor[:, :5] for key, tensor in given.items() if tensor.dim() == len(tensor) == 2})


def no_placeholder(given):
    given["input_ids"][given["input_ids"] == IMAGE] = 1


def other_size(given):
    given["pixel_values"] = torch.zeros(1, 3, 12, 8)


BAD_BATCHES = [
    (
        "Llava",
        without("pixel_values"),
        r"input_ids has 4 image placeholders \(id 39\), and 'pixel_values' is missing: ",
    ),
    (
        "Llava",
        no_placeholder,
        r"pixel_values is \[1, 3, 8, 8\], and input_ids has no image placeholder \(id 39\): each",
    ),
    (
        "Llava",
        cut_short,
        r"has 3 image placeholders .* pixel_values of shape \[1, 3, 8, 8\] \(Image features and .* tokens: 3, ",
    ),
    (
        "Llava",
        lambda given: given.update(pixel_values=torch.zeros(1, 3, 12, 8)),
        r"\(Input image size \(12\*8\) doesn't",
    ),
    (
        "Gemma3",
        without("pixel_values"),
        r"input_ids has 4 image placeholders \(id 39\), and 'pixel_values' is missing: ",
    ),
    (
        "Gemma3",
        cut_short,
        r"has 3 image placeholders .* pixel_values of shape \[1, 3, 8, 8\] \(.*: .* do not truncate",
    ),
    ("Gemma3", without("token_type_ids"), "the batch has 'pixel_values', and 'token_type_ids' is missing: each place"),
    (
        "Qwen3-VL",
        without("image_grid_thw"),
        "the batch has 'pixel_values', and 'image_grid_thw' is missing: each place",
    ),
    ("Qwen3-VL", without("mm_token_type_ids"), "'mm_token_type_ids' is missing: each place"),
    (
        "Qwen3-VL",
        cut_short,
        r"has 3 image placeholders .* pixel_values of shape \[4, 48\] \(they need .4.\): .* do not truncate",
    ),
]
"""A family, a mistake in its batch, and a part of the message."""


@pytest.mark.ranks(2, timeout=120)
def test_batches_whose_images_do_not_fit_raise_on_all_ranks():
    for name, spoil, text in [*BAD_BATCHES, *((name, None, "") for name in MODELS)]:
        with keep_fp64(), Strategy(parallel={"tensor": {"size": 2, "mode": "1d"}}) as strategy:
            model, given = made(name), batch(name, 0, 0, with_image=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            plans = {model: QWEN3_VL} if name == "Qwen3-VL" else {}
            model, optimizer = strategy.initialize(model, optimizer, plans=plans)
            if spoil is None:
                loss = strategy.execute_pipeline(iter([given]), model, None, optimizer)
                assert abs(loss.item() - made(name)(**given).loss.item()) < 1e-10, name
                continue
            spoil(given)
            with pytest.raises((ValueError, PipelineError), match=text):
                strategy.execute_pipeline(iter([given]), model, None, optimizer)
            assert all(parameter.grad is None for parameter in model.parameters())


WAYS = {
    "data": {"zero": 3},
    "tensor": {"parallel": {"tensor": {"size": 2, "mode": "1d"}}},
    "pipeline": {"parallel": {"pipeline": 2}, "pipeline": {"microbatches": 2}},
}
ON_ONE_RANK = [
    *BAD_BATCHES,
    ("Llava", lambda given: given.update(pixel_values=given["pixel_values"][:0]), "pixel_values of shape .0, 3, 8, 8"),
    ("Qwen3-VL", lambda given: given.update(position_ids=torch.zeros(3, 2, 8)), "position_ids .* restarts in a row"),
]


@for_each(way=WAYS)
@pytest.mark.ranks(2, timeout=120)
def test_images_that_do_not_fit_on_one_rank_raise_on_all_ranks(way):
    """The ranks of a replica compare the first, second, fourth and eighth batch, and find other mistakes alone."""
    for name in MODELS:
        with keep_fp64(), Strategy(**WAYS[way]) as strategy:
            model, good = made(name), given_image(name)
            plans = {model: QWEN3_VL} if name == "Qwen3-VL" and way == "tensor" else {}
            model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), plans=plans)
            expected = [strategy.execute_pipeline(iter([good]), model, None, optimizer) for _ in range(2)]
            for number, (_, spoil, text) in enumerate(each for each in ON_ONE_RANK if each[0] == name):
                given = given_image(name)
                if dist.get_rank() == number % 2:
                    spoil(given)
                with pytest.raises(ValueError, match=f"{text}|have another batch than rank 0"):
                    strategy.execute_pipeline(iter([given]), model, None, optimizer)
            # No rank has begun the step, so all can continue.
            loss = strategy.execute_pipeline(iter([good]), model, None, optimizer)
            assert loss.item() == expected[0].item(), (way, name)


def llava_next():
    return llava("LlavaNext", image_grid_pinpoints=[[8, 16], [16, 8], [16, 16]])


def smol_vlm():
    return transformers.SmolVLMForConditionalGeneration(
        transformers.SmolVLMConfig(
            vision_config={**TOWER, "image_size": 8, "patch_size": 2},
            text_config=transformers.LlamaConfig(**TEXT),
            image_token_id=IMAGE,
            scale_factor=2,
        )
    )


def uneven(name):
    """Two rows of as many labels, with one and two images; those of LLaVA-NeXT are of two aspect ratios."""
    ids = torch.randint(1, WORDS, (2, 48), generator=torch.Generator().manual_seed(5))
    pixels = torch.randn(2, 5, 3, 8, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    if name == "SmolVLM":
        mask = torch.ones(2, 2, 8, 8, dtype=torch.bool)
        given = {"pixel_values": pixels[:, :2].clone(), "pixel_attention_mask": mask}
        given["pixel_values"][0, 1], given["pixel_attention_mask"][0, 1], first, second = 0, False, 4, 8
    else:
        given = {"pixel_values": pixels[[0, 1, 0]], "image_sizes": torch.tensor([[16, 16], [8, 16], [8, 16]])}
        first, second = 24, 28
    ids[0, 2 : 2 + first], ids[1, 2 : 2 + second] = IMAGE, IMAGE
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), **given}


UNEVEN = {"LLaVA-NeXT": llava_next, "SmolVLM": smol_vlm}


@for_each(name=UNEVEN)
@pytest.mark.ranks(2, timeout=120)
def test_images_of_uneven_numbers_and_sizes_equal_one_device_in_microbatches(name):
    make = UNEVEN[name]
    torch.manual_seed(0)
    reference = make().double()
    text = {key: uneven(name)[key].clamp(max=WORDS) for key in ("input_ids", "labels")}
    text["labels"] = uneven(name)["labels"]
    with keep_fp64():
        for given in (uneven(name), text):  # as many labels, so the mean over ranks is the mean of their losses
            (reference(**given, use_cache=False).loss / 2).backward()
    for microbatches in (1, 2):
        with keep_fp64(), Strategy(pipeline={"microbatches": microbatches}) as strategy:
            torch.manual_seed(0)
            model = make().double()
            before = {key: x.detach().clone() for key, x in model.named_parameters()}
            model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
            mine = text if dist.get_rank() else uneven(name)
            strategy.execute_pipeline(iter([mine]), model, None, optimizer)
            optimizer.step()
            for (key, after), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
                gradient = 0.0 if expected.grad is None else expected.grad
                assert (before[key] - after - gradient).abs().max() < 1e-10, (microbatches, key)
            # Mistakes on one rank raise on all ranks, which continue with the next batch.
            few, more = uneven(name), uneven(name)
            few["input_ids"][0, 2] = 1
            more["pixel_values"] = more["pixel_values"].repeat_interleave(2, 0)
            for bad in (few, more):
                with pytest.raises(ValueError, match="do not fit the images in pixel_values"):
                    strategy.execute_pipeline(iter([text if dist.get_rank() else bad]), model, None, optimizer)
            strategy.execute_pipeline(iter([mine]), model, None, optimizer)


@pytest.mark.ranks(2, timeout=120)
def test_images_on_one_rank_of_a_sequence_raise_on_all_ranks():
    with Strategy(parallel={"sequence": {"size": 2, "mode": "gather"}}) as strategy:
        for name in ("Llava", "Qwen3-VL"):
            model = MODELS[name]()
            model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
            for rank in (0, 1):
                given = {key: x.float() if x.is_floating_point() else x for key, x in given_image(name, False).items()}
                expected = strategy.execute_pipeline(iter([given]), model, None, optimizer)
                mine = given_image(name, dist.get_rank() == rank)
                with pytest.raises(ValueError, match=r"pixel_values is .* and images have none; use the ranks"):
                    strategy.execute_pipeline(iter([mine]), model, None, optimizer)
                assert strategy.execute_pipeline(iter([given]), model, None, optimizer).item() == expected.item()
            optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_data_ranks_accumulate_and_evaluate_different_numbers_of_images():
    """A rank waits for no other one where it computes alone, although errors are raised on all ranks elsewhere."""
    with keep_fp64(), Strategy() as strategy:
        reference, model = made("Llava"), made("Llava")
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
        mine, bad = dist.get_rank(), {**given_image("Llava"), "pixel_values": None}
        for _ in range(2 + mine):
            loss = strategy.execute_pipeline(iter([given_image("Llava")]), model, None, optimizer, forward_only=True)
            assert abs(loss.item() - reference(**given_image("Llava")).loss.item()) < 1e-10
        with strategy.no_sync(model):
            for _ in range(1 + mine):
                strategy.execute_pipeline(iter([given_image("Llava")]), model, None, optimizer)
        strategy.execute_pipeline(iter([given_image("Llava")]), model, None, optimizer)
        optimizer.step()
        with pytest.raises(ValueError, match="'pixel_values' is missing"):
            strategy.execute_pipeline(iter([bad if mine else given_image("Llava")]), model, None, optimizer)


@contextlib.contextmanager
def nested(strategy, model):
    with strategy.no_sync(model):
        with strategy.no_sync(model):
            pass
        yield


ACCUMULATING = {
    "nested": nested,
    "of par-zero": lambda _, model: no_sync(model),
    "of the model": lambda _, model: model.no_sync(),
    "of the compiled model": lambda strategy, model: strategy.no_sync(torch.compile(model, backend="eager")),
}


@for_each(way=ACCUMULATING)
@pytest.mark.ranks(2, timeout=120)
def test_data_ranks_accumulate_bad_images_in_any_no_sync(way):
    """A rank with fewer passes takes no part in a reduction of another rank's flag, whichever context accumulates."""
    with keep_fp64(), Strategy() as strategy:
        model, mine = made("Llava"), dist.get_rank()
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
        good, bad = given_image("Llava"), {**given_image("Llava"), "pixel_values": None}
        with ACCUMULATING[way](strategy, model), count_collectives() as counted:
            for _ in range(1 + mine):
                strategy.execute_pipeline(iter([good]), model, None, optimizer)
            if mine:  # the ranks do not wait for each other here, so this rank raises alone
                with pytest.raises(ValueError, match="'pixel_values' is missing"):
                    strategy.execute_pipeline(iter([bad]), model, None, optimizer)
        assert not [event for event in counted.events if len(event.ranks) > 1]
        with pytest.raises(ValueError, match="'pixel_values' is missing"):
            strategy.execute_pipeline(iter([bad if mine else good]), model, None, optimizer)
        strategy.execute_pipeline(iter([good]), model, None, optimizer)
        optimizer.step()
        # All batches are equal, so the mean over the passes of both ranks is the gradient of one batch.
        reference = made("Llava")
        reference(**good).loss.backward()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            gradient = torch.zeros_like(expected) if expected.grad is None else expected.grad
            assert (parameter - (expected - gradient)).abs().max() < 1e-10  # fp64; sums in another order


@pytest.mark.ranks(2, timeout=120)
def test_folders_of_vision_language_models_open_with_and_without_adapters(tmp_path):
    """Transformers renames the tensors of LLaVA in its files, and an adapter's wrapper has names of its own."""
    peft = pytest.importorskip("peft")
    with Strategy(parallel={"tensor": {"size": 2, "mode": "1d"}}) as strategy:
        for name in MODELS:
            reference, targets = made(name).float(), r".*language_model.*(q_proj|o_proj|up_proj)"
            if dist.get_rank() == 0:
                reference.save_pretrained(tmp_path / name)
            dist.barrier()
            plan = QWEN3_VL if name == "Qwen3-VL" else "auto"
            given = {key: x.float() if x.is_floating_point() else x for key, x in given_image(name).items()}
            expected = reference(**given).loss.item()
            for adapter in (None, peft.LoraConfig(r=2, target_modules=targets)):  # B is zero at first
                model = strategy.from_pretrained(tmp_path / name, plan=plan, adapter=adapter)
                assert type(pretrained_of(model)) is type(reference)
                assert abs(model(**given).loss.item() - expected) < 1e-5, (name, adapter)  # fp32


@pytest.mark.ranks(2, timeout=120)
def test_generate_with_images_at_stage_3_within_summon_equals_one_device():
    """Transformers calls the encoder of images outside of the forward of the model, where its weights are shards."""
    with keep_fp64(), Strategy(zero=3) as strategy:
        for name in MODELS:
            reference, model = made(name), made(name)
            model, _ = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
            prompt = {key: x for key, x in given_image(name).items() if key != "labels"}
            how = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            with summon(model):
                tokens = model.eval().generate(**prompt, **how)
            assert tokens.equal(reference.eval().generate(**prompt, **how)), name
