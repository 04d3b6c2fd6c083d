"""Texts of errors that travel between ranks. Without torch, because commands report errors before they import it."""


def error_text(error: BaseException) -> str:
    """Return the text of an error in a form that any rank can receive, print and log.

    File names that are not valid text contain lone surrogates, which no encoding accepts. The `__str__` of an error may
    also fail. In both cases a rank without this function could not report its error to the other ranks.

    Args:
        error: Error.
    """
    try:
        text = str(error)
    except Exception as failure:  # of the error's own code
        text = f"its text cannot be read ({type(failure).__name__})"
    return text.encode(errors="backslashreplace").decode()
