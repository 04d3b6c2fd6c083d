"""Texts of errors that travel between ranks. Without torch, because commands report errors before they import it."""


def error_text(error: BaseException) -> str:
    """Return the text of an error in a form that any rank can receive, print and log.

    Names of files that are no text come as lone surrogates, which no encoding takes, and an error's own code may fail
    while it makes its text. A rank that stumbled over either could not tell the others why it failed.

    Args:
        error: The error.
    """
    try:
        text = str(error)
    except Exception as failure:  # of the error's own code
        text = f"its text cannot be read ({type(failure).__name__})"
    return text.encode(errors="backslashreplace").decode()
