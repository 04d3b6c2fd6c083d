"""Files of text as tokens: what is written, who writes it, and what is said of what cannot be read."""

import itertools
import json
import os
import shutil

import numpy as np
import pytest
import torch.distributed as dist

from par_data.text import corpus as module
from par_data.text.corpus import Corpus, open_corpus, read_corpus
from par_data.text.tokenize import load_tokenizer


def documents_in(corpus):
    ends = corpus.documents.astype(np.int64)
    return [corpus.tokens[a:b].tolist() for a, b in itertools.pairwise(ends)]


def written(path, *lines, end="\n"):
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + end.encode() for line in lines))
    return path


def chat(*messages):
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in messages]})


def test_text_line_is_a_document(tiny, tmp_path):
    model, corpora = tiny
    tokenizer = load_tokenizer(model)
    corpus = read_corpus(corpora["text"], model, tmp_path)
    lines = corpora["text"].read_text().splitlines()
    assert corpus.format == "text"
    assert len(corpus) == len(lines) > 40
    assert documents_in(corpus) == [[*ids, tokenizer.eos_token_id] for ids in tokenizer(lines)["input_ids"]]
    assert corpus.lengths.tolist() == [len(each) for each in documents_in(corpus)]
    assert (corpus.vocabulary, corpus.padding) == (512, tokenizer.pad_token_id)
    assert corpus.trained is None
    assert corpus.targets(3, 20).all()
    assert {path.name for path in corpus.path.iterdir()} == {
        "tokens.u32",
        "documents.u64",
        "hashes.u64",
        "corpus.json",
    }


def test_stop_raises_and_removes_the_tokens(tiny, tmp_path):
    model, corpora = tiny
    asked = iter([False] * 5 + [True])
    with pytest.raises(InterruptedError, match=r"stopped while the corpus '.*' was tokenized; its tokens were removed"):
        read_corpus(corpora["text"], model, tmp_path / "data", stop=lambda: next(asked))
    assert list((tmp_path / "data").iterdir()) == []
    assert len(read_corpus(corpora["text"], model, tmp_path / "data", stop=lambda: False)) > 40


def test_json_object_is_a_document_and_empty_lines_are_skipped(tiny, tmp_path):
    model, corpora = tiny
    tokenizer = load_tokenizer(model)
    corpus = read_corpus(corpora["jsonl"], model, tmp_path)
    texts = [json.loads(line)["text"] for line in corpora["jsonl"].read_text().splitlines()]
    assert corpus.format == "jsonl"
    assert [tokenizer.decode(ids[:-1]) for ids in documents_in(corpus)] == texts
    path = written(tmp_path / "c.jsonl", "", '{"body": "\u00e9 one"}', "  ", '{"body": ""}', end="\r\n")
    corpus = read_corpus(path, model, tmp_path, field="body")
    assert [tokenizer.decode(ids) for ids in documents_in(corpus)] == ["\u00e9 one<|end|>", "<|end|>"]


def test_byte_order_mark_is_not_part_of_the_text(tiny, tmp_path):
    path = written(tmp_path / "c.txt", b"\xef\xbb\xbfone", "two")
    corpus = read_corpus(path, tiny[0], tmp_path)
    assert load_tokenizer(tiny[0]).decode(corpus.tokens.tolist()) == "one<|end|>two<|end|>"


@pytest.mark.parametrize("batch", [2, 1000])
def test_chat_targets_are_the_assistants_tokens(batch, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("par_data.text.tokenize._BATCH", batch)
    model, corpora = tiny
    tokenizer = load_tokenizer(model)
    path = written(
        tmp_path / "c.jsonl",
        chat(
            ("system", "be \u00e9xact"),
            ("user", "one?"),
            ("assistant", "\u00fcn\u2603, one"),
            ("user", "two?"),
            ("assistant", "2"),
        ),
        chat(("user", "alone")),
        chat(("assistant", "first")),
    )
    corpus = read_corpus(path, model, tmp_path)
    assert corpus.format == "chat"
    said, begin = [], 0
    for ids in documents_in(corpus):
        targets = corpus.targets(begin, begin + len(ids))
        said.append(tokenizer.decode([token for token, target in zip(ids, targets, strict=True) if target]))
        begin += len(ids)
    assert said == ["\u00fcn\u2603, one<|end|>2<|end|>", "", "first<|end|>"]
    first = tokenizer.decode(documents_in(corpus)[0])
    assert first.startswith("<|system|>be \u00e9xact<|end|><|user|>one?<|end|><|assistant|>")
    many = read_corpus(corpora["chat"], model, tmp_path)
    bits = np.unpackbits(many.trained, bitorder="little")[: len(many.tokens)].astype(bool)
    for low, high in ((0, 9), (3, 8), (8, 16), (5, 5), (0, len(bits)), (len(bits) - 1, len(bits))):
        assert many.targets(low, high).tolist() == bits[low:high].tolist()


def test_template_file_replaces_the_tokenizers_template(tiny, tmp_path):
    model = shutil.copytree(tiny[0], tmp_path / "model")
    path = written(tmp_path / "c.jsonl", chat(("user", "a"), ("assistant", "b")))
    template = "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
    mine = written(tmp_path / "mine.jinja", template, end="")
    corpus = read_corpus(path, model, tmp_path, template=mine)
    assert load_tokenizer(model).decode(corpus.tokens.tolist()) == "ab"
    assert corpus.targets(0, len(corpus.tokens)).all()
    written(model / "chat_template.jinja", "{{ messages[0].content }}")
    with pytest.raises(ValueError, match=r"so there are no targets; .* write \{% generation %\} before"):
        read_corpus(path, model, tmp_path)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="the tokenizer has no chat template; set template to a file"):
        read_corpus(path, model, tmp_path)


def test_existing_tokens_are_mapped_without_tokenizing(tiny, tmp_path, monkeypatch):
    model, path = tiny[0], written(tmp_path / "c.txt", "one", "two")
    first = read_corpus(path, model, tmp_path / "data")
    stamps = {file.name: file.stat().st_mtime_ns for file in first.path.iterdir()}
    shutil.copy(path, tmp_path / "copy.txt")
    monkeypatch.setattr(module, "load_tokenizer", None)
    again = read_corpus(tmp_path / "copy.txt", model, tmp_path / "data")
    assert again.path == first.path
    assert {file.name: file.stat().st_mtime_ns for file in again.path.iterdir()} == stamps
    monkeypatch.undo()
    others = shutil.copytree(model, tmp_path / "model")
    (others / "tokenizer_config.json").write_text((others / "tokenizer_config.json").read_text() + "\n")
    written(tmp_path / "d.txt", "one", "three")
    made = [read_corpus(path, others, tmp_path / "data"), read_corpus(tmp_path / "d.txt", model, tmp_path / "data")]
    assert len({first.path, *(each.path for each in made)}) == 3


def test_it_appears_whole_or_not_at_all(tiny, tmp_path, monkeypatch):
    model, path = tiny[0], written(tmp_path / "c.txt", "one", "two")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write_durably", fail)
    with pytest.raises(OSError, match="No space left"):
        read_corpus(path, model, tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []
    monkeypatch.undo()
    place = read_corpus(path, model, tmp_path / "data").path
    prefix = f".{place.name}.tmp-{os.uname().nodename}-"
    shutil.move(place, place.with_name(prefix + "4194305"))  # of a process that was killed: Linux counts to 2**22
    another = place.with_name(f"{prefix}{os.getppid()}")
    another.mkdir()
    assert documents_in(read_corpus(path, model, tmp_path / "data"))
    assert set((tmp_path / "data").iterdir()) == {place, another}


def test_open_corpus_rejects_a_file_of_another_size(tiny, tmp_path):
    place = read_corpus(written(tmp_path / "c.txt", "one", "two"), tiny[0], tmp_path).path
    (place / "tokens.u32").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"tokens\.u32' has 4 bytes instead of [0-9]+; remove the folder"):
        open_corpus(place)
    (place / "corpus.json").unlink()
    with pytest.raises(ValueError, match="holds no corpus"):
        open_corpus(place)


BAD = {
    "no JSON": ('{"text": "a"', r"is not JSON \(.*\); write one object per line"),
    "no object": ("[1]", r"is \[1\], not a JSON object; write one object per line"),
    "no field": ('{"body": "a"}', "has no 'text', only 'body'; set field to the key of the text"),
    "no text": ('{"text": 3}', "has 3 under 'text'; use a string"),
    "no UTF-8": (b'{"text": "\xff"}', r"is not UTF-8 \(.*\); convert the file to UTF-8"),
}
BAD_CHATS = {
    "no messages": ('{"text": "a"}', "has None under 'messages'; use a list with at least one"),
    "no message": ('{"messages": []}', r"has \[\] under 'messages'; use a list"),
    "no role": ('{"messages": [{"content": "a"}]}', r"has \{'content': 'a'\} as message 0; use an object with 'role'"),
    "no content": (chat(("user", None)), "has None as the content of message 0; use a string"),
    "a refusal": (chat(("judge", "a")), r"is rejected by the chat template \(no judges\); correct the conversation"),
}


@pytest.mark.parametrize("name", [*BAD, *BAD_CHATS])
def test_bad_line_raises_with_its_number(name, tiny, tmp_path):
    model, template = tiny[0], None
    good, (bad, words) = '{"text": "fine"}', {**BAD, **BAD_CHATS}[name]
    if name in BAD_CHATS:
        good = chat(("user", "a"), ("assistant", "b"))
        refusing = "{% for m in messages %}{% if m.role == 'judge' %}{{ raise_exception('no judges') }}{% endif %}"
        template = written(
            tmp_path / "t.jinja", refusing + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        )
    path = written(tmp_path / "c.jsonl", good, "", good, bad, good)
    with pytest.raises(ValueError, match=f"c.jsonl, line 4 {words}"):
        read_corpus(path, model, tmp_path / "data", template=template)
    assert list((tmp_path / "data").iterdir()) == []


def test_read_corpus_rejects_wrong_arguments(tiny, tmp_path, monkeypatch):
    model, path = tiny[0], written(tmp_path / "c.txt", "one")
    (tmp_path / "empty").mkdir()
    for arguments, keywords, words in (
        ((tmp_path / "none.txt", model), {}, "does not exist; correct the path"),
        ((tmp_path / "empty", model), {}, "is a folder without .txt, .* files; use a folder that has some"),
        ((tmp_path / "*.csv", model), {}, "is a pattern that matches no file; correct the pattern"),
        ((written(tmp_path / "c.parquet", "x"), model), {}, "the table .*c.parquet' cannot be read .*; repair"),
        (
            (written(tmp_path / "blank.txt", "", " "), model),
            {},
            "has no document; use files with at least one line of text",
        ),
        ((path, tmp_path / "empty"), {}, "holds no tokenizer; use the folder"),
        (
            (path, model),
            {"format": "csv"},
            "format='csv' is unknown; use 'auto', 'text', 'jsonl' or 'chat'",
        ),
        ((path, model), {"template": tmp_path / "none"}, "template=.* does not exist; correct the path"),
    ):
        with pytest.raises(ValueError, match=words):
            read_corpus(*arguments, tmp_path / "data", **keywords)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers; pip install transformers jinja2"):
        read_corpus(path, model, tmp_path / "data")


def test_split_depends_on_the_tokens_of_a_document(tiny, tmp_path):
    lines = [f"this is document number {number}" for number in range(400)]
    some = read_corpus(written(tmp_path / "a.txt", *lines[:200]), tiny[0], tmp_path)
    more = read_corpus(written(tmp_path / "b.txt", *lines[::-1], *lines), tiny[0], tmp_path)

    def held_out(corpus, fraction):
        train, others = corpus.split(fraction)
        assert sorted([*train, *others]) == list(range(len(corpus)))
        documents = [tuple(document) for document in documents_in(corpus)]
        return {documents[number] for number in others}, {documents[number] for number in train}

    out, kept = held_out(some, 0.2)
    out_of_more, kept_of_more = held_out(more, 0.2)
    assert 20 <= len(out) <= 60, "200 draws of one in five: within four standard deviations, 5.7 each"
    assert out <= out_of_more
    assert kept <= kept_of_more
    assert not out_of_more & kept_of_more, "copies are on one side"
    assert held_out(some, 0.0)[0] == set()
    assert out <= held_out(some, 0.5)[0], "a larger part holds the smaller one"
    for fraction in (1.0, -0.1, 2):
        with pytest.raises(ValueError, match=r"fraction=.*: the held-out fraction must be"):
            some.split(fraction)


@pytest.mark.ranks(3)
def test_first_rank_of_each_machine_writes_the_tokens(tiny, tmp_path, monkeypatch):
    rank = dist.get_rank()
    writers = []
    write = module._write
    monkeypatch.setattr(module, "_write", lambda *arguments: writers.append(rank) or write(*arguments))
    if rank == 2:  # as ranks 0 and 1 share a machine
        monkeypatch.setattr(module.socket, "gethostname", lambda: "another")
    path = tiny[1]["chat"]
    corpus = read_corpus(path, tiny[0], tmp_path / "data")
    assert isinstance(corpus, Corpus)
    assert writers in ([], [rank]) if rank != 1 else writers == []
    found = [None] * 3
    dist.all_gather_object(found, (len(corpus), int(corpus.tokens.sum()), corpus.path.name))
    assert found[0] == found[1] == found[2]
    assert [each.name for each in (tmp_path / "data").iterdir()] == [corpus.path.name]


@pytest.mark.ranks(2)
def test_error_of_one_rank_raises_on_all_ranks(tiny, tmp_path):
    rank = dist.get_rank()
    mine = tmp_path / str(rank)
    mine.mkdir()
    if rank == 0:
        written(mine / "c.jsonl", '{"text": 3}')
    with pytest.raises(ValueError, match="under 'text'; use a string" if rank == 0 else "rank 0: ValueError: .*line 1"):
        read_corpus(tmp_path / "0/c.jsonl", tiny[0], tmp_path / "data", format="jsonl")
    written(mine / "c.txt", f"of rank {rank}")
    with pytest.raises(ValueError, match=r"differs on ranks \[1\]; use the same files on all ranks"):
        read_corpus(mine / "c.txt", tiny[0], tmp_path / "data")
    with pytest.raises(ValueError, match="does not exist; correct the path"):
        read_corpus(tmp_path / "0" / "c.txt" if rank == 0 else "none.txt", tiny[0], tmp_path / "data")


def table(path, **columns):
    """A table in the format that the name of a file says."""
    pa = pytest.importorskip("pyarrow")
    made = pa.table(columns)
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(made, path, row_group_size=3)
        return path
    begin = pa.ipc.new_file if "file" in path.stem else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, begin(sink, made.schema) as writer:
        writer.write_table(made, max_chunksize=3)
    return path


@pytest.mark.parametrize("name", ["c.parquet", "stream.arrow", "file.arrow"])
def test_table_row_is_a_document(name, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("par_data.text.records._ROWS", 4)
    texts = [f"number {number}" for number in range(11)]
    path = table(tmp_path / name, id=list(range(11)), body=texts)
    corpus = read_corpus(path, tiny[0], tmp_path / "data", field="body", progress=True)
    lines = [json.dumps({"body": text}) for text in texts]
    same = read_corpus(written(tmp_path / "c.jsonl", *lines), tiny[0], tmp_path / "data", field="body")
    assert corpus.format == "jsonl"
    assert documents_in(corpus) == documents_in(same)
    with pytest.raises(ValueError, match=f"{name} has no column 'text', only 'id', 'body'; set field"):
        read_corpus(path, tiny[0], tmp_path / "data")
    with pytest.raises(ValueError, match="a table has no lines of text; use format='jsonl'"):
        read_corpus(path, tiny[0], tmp_path / "data", format="text")
    broken = table(tmp_path / f"broken-{name}", text=["fine", "fine", None])
    with pytest.raises(ValueError, match=f"broken-{name}, row 3 has None under 'text'; use a string"):
        read_corpus(broken, tiny[0], tmp_path / "data")


def test_table_of_conversations_equals_their_lines(tiny, tmp_path):
    lines = tiny[1]["chat"].read_text().splitlines()
    path = table(tmp_path / "c.parquet", messages=[json.loads(line)["messages"] for line in lines])
    corpus, same = (read_corpus(each, tiny[0], tmp_path / "data") for each in (path, tiny[1]["chat"]))
    assert corpus.format == "chat"
    assert documents_in(corpus) == documents_in(same)
    assert corpus.trained.tolist() == same.trained.tolist()


def test_several_files_are_read_sorted_by_name(tiny, tmp_path):
    folder, pattern = tmp_path / "cache", tmp_path / "parts" / "train-*.parquet"
    folder.mkdir()
    pattern.parent.mkdir()
    for number in (2, 0, 1):
        table(folder / f"cache-{number}.arrow", text=[f"{number} a", f"{number} b"])
        table(pattern.parent / f"train-{number}.parquet", text=[f"{number} a", f"{number} b"])
    table(pattern.parent / "test-0.parquet", text=["held out"])
    (folder / "dataset_info.json").write_text("{}")  # as a cache of data sets has it
    lines = [f"{number} {letter}" for number in range(3) for letter in "ab"]
    expected = documents_in(read_corpus(written(tmp_path / "c.txt", *lines), tiny[0], tmp_path / "data"))
    for path in (folder, pattern):
        assert documents_in(read_corpus(path, tiny[0], tmp_path / "data")) == expected
    written(folder / "more.txt", "text")
    with pytest.raises(ValueError, match=r"is a folder with .arrow and .txt files: all files must be of one kind"):
        read_corpus(folder, tiny[0], tmp_path / "data")


def test_read_corpus_maps_the_folder_of_a_corpus(tiny, tmp_path, monkeypatch):
    corpus = read_corpus(tiny[1]["text"], tiny[0], tmp_path / "data")
    monkeypatch.setattr(module, "load_tokenizer", None)
    again = read_corpus(corpus.path, tiny[0], tmp_path / "other")
    assert again.path == corpus.path
    assert documents_in(again) == documents_in(corpus)
    assert not (tmp_path / "other").exists()


def test_table_without_pyarrow_raises_with_the_command(tiny, tmp_path, monkeypatch):
    path = table(tmp_path / "c.parquet", text=["a"])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow to be read; pip install pyarrow"):
        read_corpus(path, tiny[0], tmp_path / "data")
