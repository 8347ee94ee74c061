"""Types of the text columns: what cannot be stored is refused in a name and mended in a note, on every database alike."""

from __future__ import annotations

from sqlalchemy import Dialect, String
from sqlalchemy.types import TypeDecorator

from relax_sdk.storable import check_name, storable_text


class Name(TypeDecorator[str]):
    """Text that something is found by. One that could not be stored is refused, also where it is only asked for."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Check a value on its way to the database.

        Raises:
            UnstorableError: it holds a NUL character or half of a surrogate pair.
        """
        if value is not None and ("\0" in value or not value.isascii()):
            check_name(value, f"the name {value[:80]!r}")
        return value


class Note(TypeDecorator[str]):
    """Text for people, such as the message of an error, whose author cannot be asked: stored as near as can be."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """The nearest text that a database takes."""
        return storable_text(value).replace("\0", "\ufffd") if value is not None else None
