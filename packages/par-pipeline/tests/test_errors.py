from par_pipeline._errors import Failure


def test_failure_of_a_text_that_no_encoding_takes_is_escaped():
    failure = Failure.of(FileNotFoundError("weights-\udcff.bin"), 1, None)
    assert (failure.kind, failure.text) == ("FileNotFoundError", r"weights-\udcff.bin")
    assert len(Failure.of(ValueError("\udcff" * 1000), 1, None).text.encode()) <= 300
