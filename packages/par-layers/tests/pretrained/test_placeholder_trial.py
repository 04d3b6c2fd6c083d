"""The trial of images accepts what the model's own forward accepts, and nothing else."""

import pytest
import torch

from par_layers.pretrained.placeholder_trial import PlaceholderTrial

transformers = pytest.importorskip("transformers")

IMAGE = 39
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def made(name, vision, **own):
    config = getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(
        config(vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_id=IMAGE, **own)
    )
    return model.eval()


def llava(name="Llava", **own):
    return made(
        name, transformers.CLIPVisionConfig(**TOWER, image_size=8, patch_size=4), vision_feature_layer=-1, **own
    )


def llava_next():
    return llava("LlavaNext", image_grid_pinpoints=[[8, 16], [16, 8], [16, 16]])


def intern_vl():
    vision = transformers.InternVLVisionConfig(**TOWER, image_size=[16, 16], patch_size=[4, 4])
    return made("InternVL", vision, downsample_ratio=0.5)


def mistral3():
    vision = transformers.PixtralVisionConfig(**TOWER, image_size=16, patch_size=4)
    return made("Mistral3", vision, vision_feature_layer=-1, spatial_merge_size=1)


def smol_vlm(name="SmolVLM", **text):
    vision = {**TOWER, "image_size": 8, "patch_size": 2}
    own = {"text_config": transformers.LlamaConfig(**TEXT, **text), "image_token_id": IMAGE, "scale_factor": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vision_config=vision, **own)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


def idefics3():
    return smol_vlm("Idefics3", pad_token_id=0)


PIXELS = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
CASES = {
    "one size": (llava, {"pixel_values": PIXELS}, 8),
    "one image": (llava, {"pixel_values": PIXELS[:1]}, 4),
    # Four tokens of the image itself, and the tokens of its parts without what was padded, with an end for each row.
    "sizes of images": (
        llava_next,
        {"pixel_values": PIXELS[:1].expand(1, 5, 3, 8, 8), "image_sizes": torch.tensor([[16, 16]])},
        4 + 4 * 5,
    ),
    "another size": (
        llava_next,
        {"pixel_values": PIXELS[:1].expand(1, 3, 3, 8, 8), "image_sizes": torch.tensor([[8, 16]])},
        4 + 2 * 5,
    ),
    "cut patches": (
        mistral3,
        {"pixel_values": PIXELS.repeat(1, 1, 2, 2), "image_sizes": torch.tensor([[16, 8], [8, 12]])},
        8 + 6,
    ),
    # Rows have different numbers of images, and zeros stand for those that a row lacks.
    "padded images": (
        smol_vlm,
        {"pixel_values": PIXELS[:, None] * torch.tensor([[1, 1], [1, 0]])[..., None, None, None]},
        12,
    ),
    "padded images of another comparison": (idefics3, {"pixel_values": PIXELS[:, None]}, 8),
    "merged patches": (intern_vl, {"pixel_values": PIXELS.repeat(1, 1, 2, 2)}, 8),
}


def ids_with(number):
    ids = torch.ones(2, 20, dtype=torch.long)
    ids.view(-1)[:number] = IMAGE
    return ids


@pytest.mark.parametrize("case", CASES)
def test_trial_objects_where_the_forward_does(case):
    make, images, needed = CASES[case]
    model = make()
    trial = PlaceholderTrial(model)
    for found in (needed - 1, needed, needed + 1, needed):
        batch = {"input_ids": ids_with(found), **images}
        problem = trial.problem(batch, found)
        if found == needed:
            assert problem is None
            assert model(**batch).logits.isfinite().all()
        else:
            with pytest.raises(ValueError, match="Image features and image tokens do not match"):
                model(**batch)
            assert f"Image features and image tokens do not match, tokens: {found}, features: " in problem


def test_pixels_of_another_size_are_objected_to():
    model = llava()
    batch = {"input_ids": ids_with(6), "pixel_values": torch.zeros(1, 3, 12, 8)}
    problem = PlaceholderTrial(model).problem(batch, 6)
    with pytest.raises(ValueError, match="doesn't match model") as caught:
        model(**batch)
    assert problem == str(caught.value)


def test_model_that_mixes_numbers_of_pixels_with_its_features_is_left_to_its_forward(monkeypatch):
    project = transformers.LlavaModel.get_image_features

    def read(self, pixel_values, **keywords):
        outputs = project(self, pixel_values, **keywords)
        assert isinstance(outputs.pooler_output[0].sum().item(), float)
        return outputs

    monkeypatch.setattr(transformers.LlavaModel, "get_image_features", read)
    model = llava()
    trial = PlaceholderTrial(model)
    batch = {"input_ids": ids_with(3), "pixel_values": PIXELS[:1]}
    with pytest.raises(ValueError, match="Image features and image tokens do not match"):
        model(**batch)
    assert trial.problem(batch, 3) is None
    # The copy is not run again in each batch.
    monkeypatch.setattr(PlaceholderTrial, "_run", None)
    assert trial.problem(batch, 3) is None


def test_keys_that_the_forward_cannot_read_are_objected_to_after_a_good_batch():
    trial = PlaceholderTrial(llava_next())
    _, images, needed = CASES["sizes of images"]
    batch = {"input_ids": ids_with(needed), **images}
    assert trial.problem(batch, needed) is None
    assert "size" in trial.problem({**batch, "pixel_values": torch.zeros(1, 5, 3, 8, 4)}, needed)
    assert "TypeError" in trial.problem({name: x for name, x in batch.items() if name != "image_sizes"}, needed)
    assert trial.problem(batch, needed) is None


def test_strings_and_numbers_of_a_batch_reach_the_trial():
    model = llava()
    trial = PlaceholderTrial(model)
    for strategy, needed in (("default", 4), ("full", 5), ("default", 4)):
        batch = {"input_ids": ids_with(needed), "pixel_values": PIXELS[:1], "vision_feature_select_strategy": strategy}
        assert model(**batch).logits.isfinite().all()
        assert trial.problem(batch, needed) is None


def test_tower_that_the_configuration_does_not_name_is_not_tried():
    model = llava()
    model.model.vision_tower = transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(**TOWER, image_size=8, patch_size=4)
    )
    batch = {"input_ids": ids_with(3), "pixel_values": PIXELS[:1], "vision_feature_select_strategy": "default"}
    assert model(**batch).logits.isfinite().all()
    assert PlaceholderTrial(model).problem(batch, 3) is None


def pool_method(model):
    features = model.model.get_image_features

    def pooled(*args, **keywords):
        outputs = features(*args, **keywords)
        outputs.pooler_output = [each[:2] for each in outputs.pooler_output]
        return outputs

    model.model.get_image_features = pooled


def pool_forward(model):
    projector = model.model.multi_modal_projector
    forward = projector.forward
    projector.forward = lambda features: forward(features)[:, :2]


def pool_hook(model):
    model.model.multi_modal_projector.register_forward_hook(lambda module, args, output: output[:, :2])


@pytest.mark.parametrize("change", [pool_method, pool_forward, pool_hook])
def test_code_of_the_caller_in_the_tower_is_not_tried(change):
    model = llava()
    change(model)
    batch = {"input_ids": ids_with(2), "pixel_values": PIXELS[:1]}
    assert model(**batch).logits.isfinite().all()
    assert PlaceholderTrial(model).problem(batch, 2) is None


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
def test_compiled_tower_and_adapter_are_tried():
    peft = pytest.importorskip("peft")
    model = llava()
    model.model.vision_tower = torch.compile(model.model.vision_tower, backend="eager")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=r".*language_model.*q_proj"))
    trial = PlaceholderTrial(model)
    assert trial.problem({"input_ids": ids_with(4), "pixel_values": PIXELS[:1]}, 4) is None
    assert "do not match" in trial.problem({"input_ids": ids_with(3), "pixel_values": PIXELS[:1]}, 3)


def test_sizes_of_images_add_up_to_the_placeholders():
    trial = PlaceholderTrial(llava_next())
    pixels, sizes = PIXELS[:1].expand(3, 5, 3, 8, 8), torch.tensor([[16, 16], [8, 16], [16, 16]])
    batch = {"input_ids": torch.full((2, 31), IMAGE), "pixel_values": pixels, "image_sizes": sizes}
    assert trial.problem(batch, 62) is None
    assert trial.sizes(batch, ["pixel_values", "image_sizes"]) == [24, 14, 24]


def test_forward_that_was_tried_is_not_tried_again(monkeypatch):
    trial = PlaceholderTrial(llava())
    batch = {"input_ids": ids_with(8), "pixel_values": PIXELS}
    assert trial.problem(batch, 8) is None
    monkeypatch.setattr(PlaceholderTrial, "_run", None)
    assert trial.problem({**batch, "pixel_values": PIXELS + 1}, 8) is None
