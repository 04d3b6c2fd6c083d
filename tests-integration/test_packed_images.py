"""Rows of text and images from a processor, packed: each document is computed as it is alone."""

import importlib

import pytest
import torch
from torch.nn import functional

from par_groups import sharding_of
from par_testing import for_each, keep_fp64
from par_train import Strategy
from par_zero import summon

transformers = pytest.importorskip("transformers", minversion="5.23")
tokenizers = pytest.importorskip("tokenizers")
from .test_vision_language import IMAGE, MODELS, QWEN3_VL, TEXT, batch  # noqa: E402 - after the skip

WORD_IDS = {f"w{number}": number for number in range(1, 30)}
SPECIAL = {"<pad>": 0, "<video>": 36, "<start>": 37, "<end>": 38, "<image>": IMAGE}
ROWS = [
    [("w3 w5 <image> w7", (8, 12)), ("w9 w2 w4 w9 w9", None), ("w8 <image> w1 w6", (8, 8))],
    [("w4 w4 w1 w2 w3 w9 w8", None), ("w5 w6 w2", None), ("w7 w9 w6 w5 w4 w3", None)],
]
"""Documents of two packed rows: text, and the height and width of its image. The second row has no image."""


def qwen2_5_vl():
    """Attention that looks for documents in positions of text only, without norms of queries and keys."""
    vision = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 16}
    vision |= {"patch_size": 4, "spatial_merge_size": 1, "temporal_patch_size": 1, "window_size": 8}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            vision_config={**vision, "fullatt_block_indexes": [1]},
            text_config={**TEXT, **ids, "rope_parameters": rope},
            image_token_id=IMAGE,
            video_token_id=36,
            vision_start_token_id=37,
            vision_end_token_id=38,
        )
    )


MODELS = {**MODELS, "Qwen2.5-VL": qwen2_5_vl}
PLANS = {"Qwen3-VL": QWEN3_VL, "Qwen2.5-VL": {key: x for key, x in QWEN3_VL.items() if "norm" not in key}}


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def processor(name):
    """A processor of a family with a vocabulary of words. The variants on PIL need no torchvision."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({**WORD_IDS, **SPECIAL}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"image_token": "<image>", "video_token": "<video>", "vision_start_token": "<start>"}
    names |= {"vision_end_token": "<end>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", extra_special_tokens=names
    )
    images = "transformers.models.{0}.image_processing_pil_{0}".format
    if name == "Llava":
        clip = importlib.import_module(images("clip")).CLIPImageProcessorPil
        pixels = clip(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
        how = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return transformers.LlavaProcessor(pixels, tokenizer, **how)

    class WithoutVideos(transformers.Qwen3VLProcessor):
        def check_argument_for_proper_class(self, argument_name, argument):
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    qwen = importlib.import_module(images("qwen2_vl")).Qwen2VLImageProcessorPil
    size = {"shortest_edge": 16, "longest_edge": 256}
    return WithoutVideos(qwen(patch_size=4, temporal_patch_size=1, merge_size=1, size=size), tokenizer, None)


def documents(name):
    """The processor's output for each document of each row, in fp64."""
    process, generator = processor(name), torch.Generator().manual_seed(0)
    rows = []
    for row in ROWS:
        rows.append([])
        for text, size in row:
            given = {"text": [text]}
            if size is not None:
                given["images"] = [torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8).numpy()]
            output = dict(process(**given, return_tensors="pt"))
            del output["attention_mask"]  # a packed row has no padding
            rows[-1].append({key: x.double() if x.is_floating_point() else x for key, x in output.items()})
    return rows


def positions(model, document, of_text):
    """Positions of the text of a document, [1, time], or of text and images, [4, 1, time], if the model has such."""
    text = torch.arange(document["input_ids"].shape[1])[None]
    if of_text or not hasattr(model.model, "get_rope_index"):
        return text
    if "image_grid_thw" not in document:
        return text.expand(4, -1, -1)
    keys = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    return torch.cat([text[None], model.model.get_rope_index(**{key: document[key] for key in keys})[0]])


def packed(model, rows, of_text):
    """One batch of packed rows, padded to the length of the longest, an even number, with positions of text alone."""
    of_tokens = {"input_ids": 0, "mm_token_type_ids": 0, "labels": -100, "position_ids": 0}
    length = max(sum(each["input_ids"].shape[1] for each in row) for row in rows)
    length += length % 2
    batch = {}
    for row in rows:
        for each in row:
            each |= {"labels": each["input_ids"].clone(), "position_ids": positions(model, each, of_text)}
            each["labels"][:, 0] = -100
            each["labels"][each["input_ids"] == IMAGE] = -100
        parts = {key: [each[key] for each in row if key in each] for each in row for key in each}
        for key, each in parts.items():
            joined = torch.cat(each, -1) if key in of_tokens else torch.cat(each)
            if key in of_tokens:
                joined = functional.pad(joined, (0, length - joined.shape[-1]), value=of_tokens[key])
            batch.setdefault(key, []).append(joined)
    return {key: torch.cat(each, -2 if key == "position_ids" else 0) for key, each in batch.items()}


def alone(model, rows):
    """Gradients of the mean loss over all labels, and the loss, when each document is a row of its own."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for each in (each for row in rows for each in row):
        takes = {key: x for key, x in each.items() if key not in {"labels", "position_ids"}}
        labels = each["labels"][0, 1:]
        total = total + functional.cross_entropy(model(**takes).logits[0, :-1], labels, reduction="sum")
        count += int((labels != -100).sum())
    (total / count).backward()
    return total.item() / count


WAYS = {
    "data": {"zero": 3},
    "tensor": {"parallel": {"tensor": {"size": 2, "mode": "1d"}}},
    "sequence parallel": {"parallel": {"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}},
    "pipeline": {"parallel": {"pipeline": 2}, "pipeline": {"microbatches": 2}},
}


def check(name, way, of_text):
    with keep_fp64(), Strategy(**WAYS[way]) as strategy:
        reference, rows = made(name), documents(name)
        batch = packed(reference, rows, of_text)
        expected = alone(reference, rows)
        model = made(name)
        plans = {model: PLANS[name]} if name in PLANS and "tensor" in WAYS[way].get("parallel", {}) else {}
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), plans=plans)
        mine = packed(reference, rows[torch.distributed.get_rank() :][:1], of_text) if way == "data" else batch
        loss = strategy.execute_pipeline(iter([mine]), model, None, optimizer)
        optimizer.step()
        after = {key: x.detach() - (0 if x.grad is None else x.grad) for key, x in reference.named_parameters()}
        if way == "data":
            with summon(model):
                far = {key: (x - after[key]).abs().max().item() for key, x in model.named_parameters()}
        else:
            far = {
                key: (box.of(x.detach()) - after[key][box.slices]).abs().max().item()
                for key, x in model.named_parameters()
                for box in sharding_of(x).boxes
            }
        worst = max(far, key=lambda key: far[key])
        assert far[worst] < 1e-10, (name, way, worst, far[worst], loss.item(), expected)
        assert abs(loss.item() - expected) < 1e-10 or way == "data", (name, way)


@for_each(way=WAYS)
@pytest.mark.ranks(2, timeout=120)
def test_packed_images_equal_their_documents_alone(way):
    for name, of_text in (("Llava", True), ("Qwen3-VL", True), ("Qwen3-VL", False)):
        check(name, way, of_text)
    if way != "sequence parallel":  # its attention computes one document at a time, of a length that ranks must divide
        check("Qwen2.5-VL", way, of_text=True)


@pytest.mark.ranks(2, timeout=120)
def test_packed_images_whose_types_make_masks_raise_on_all_ranks():
    """Transformers looks up the images of Gemma 3 at positions within a document: packed images mix documents."""
    images = {key: x[:, :8] if x.shape[-1] == 9 else x for key, x in batch("Gemma3", 0, 0, True).items()}
    texts = {key: x[:, :8] for key, x in batch("Gemma3", 0, 0, False).items()}
    places = {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0], [0, 1, 2, 3, 0, 1, 2, 3]])}
    for way, options in WAYS.items():
        with keep_fp64(), Strategy(**options) as strategy:
            alone, model = made("Gemma3"), made("Gemma3")
            model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0))
            for given in (images, {**texts, **places}):
                logits = alone(**{key: x for key, x in given.items() if key != "labels"}, use_cache=False).logits
                loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())
                mine = strategy.execute_pipeline(iter([given]), model, None, optimizer, forward_only=True)
                assert abs(mine.item() - loss.item()) < 1e-10, (way, sorted(given))
            with pytest.raises(
                ValueError, match=r"packed rows and token_type_ids: Gemma3For.*one document in each row"
            ):
                strategy.execute_pipeline(iter([{**images, **places}]), model, None, optimizer)
            assert all(parameter.grad is None for parameter in model.parameters()), way
