import logging

import pytest

from par_groups import get_logger


def test_only_the_given_ranks_speak_and_say_who_they_are(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        get_logger("test").info("only the master")
        get_logger("test", ranks=None).info("all")
        get_logger("test", ranks=[1]).warning("the second")
    assert caplog.messages == [
        "[rank 0] only the master",
        "[rank 0] all",
        "[rank 1] all",
        "[rank 1] the second",
    ]
    assert [record.rank for record in caplog.records] == [0, 0, 1, 1]


def test_the_level_stays_the_applications(caplog):
    caplog.set_level(logging.WARNING)
    get_logger("test").info("too quiet")
    assert not caplog.messages


def test_every_rank_has_its_own_file(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "3")
    for _ in range(2):
        logger = get_logger("test.file", ranks=None, file=tmp_path / "logs" / "rank{rank}.log")
    logger.warning("once")
    (handler,) = logger.logger.handlers
    handler.close()
    logger.logger.removeHandler(handler)
    lines = (tmp_path / "logs" / "rank3.log").read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("WARNING test.file: [rank 3] once")


def test_one_file_for_all_ranks_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"put \{rank\} in its name"):
        get_logger("test", file=tmp_path / "all.log")
