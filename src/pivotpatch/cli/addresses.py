"""Words of the command line that name pictures."""

from pathlib import Path

TABLES = (".csv", ".tsv", ".jsonl", ".parquet")


def read_address(word: str) -> str | None:
    """The address that a word is, or that it means: a table, or a folder of pictures; None where it is neither."""
    scheme, colon, _ = word.partition(":")
    if colon and scheme.isalpha() and len(scheme) > 1:
        return word
    from pivotpatch.data.address import Address

    path = Path(word)
    if path.is_dir():
        return str(Address("folder", word))
    return str(Address("table", word)) if path.suffix.lower() in TABLES else None
