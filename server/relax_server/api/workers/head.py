"""The head of an HTTP request as it came, looked at only far enough to see which worker serves it.

The parser decides what a request is; nothing here is believed beyond the choice of a process, and the number of bytes after
which the parser is asked whether the request is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The beginning of a request, up to its blank line."""

    size: int
    """Bytes, empty lines before it included."""
    method: str
    path: str
    """Without what follows a question mark, and unquoted."""
    body: int | None
    """Bytes of its body; None: it comes in chunks."""
    fields: bytes
    """Its header fields, each with a line end before it."""

    @property
    def secret(self) -> str:
        """The key that it shows; empty: none. The same one that `gateway.wire.bearer` finds."""
        scheme, _, secret = _field(self.fields, b"authorization").partition(b" ")
        shown = secret.strip() if scheme.lower() == b"bearer" else _field(self.fields, b"x-api-key")
        return shown.decode("latin-1")


def read_head(data: bytes) -> RequestHead | None:
    """The head of the request that bytes begin with; None: it is not whole yet.

    Args:
        data: as it came; empty lines before a request are no part of it.
    """
    begin = 0
    while data.startswith((b"\r", b"\n"), begin):
        begin += 1
    end = data.find(END, begin)
    if end < 0:
        return None
    first = data.find(b"\r\n", begin)
    method, _, target = data[begin:first].partition(b" ")
    path = target.partition(b" ")[0].partition(b"?")[0]
    if path[:4].lower() == b"http":  # the whole URL, as proxies may be told it
        path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
    text, fields = path.decode("latin-1"), data[first : end + 2]
    if "%" in text:
        text = unquote(text)
    return RequestHead(end + len(END), method.decode("latin-1"), text, _body(fields), fields)


def _body(fields: bytes) -> int | None:
    if _field(fields, b"transfer-encoding"):
        return None
    stated = _field(fields, b"content-length")
    return int(stated) if stated.isdigit() and len(stated) < 20 else 0


def _field(fields: bytes, name: bytes) -> bytes:
    """The value of a field, the last one if there are several; empty: there is none."""
    begin = fields.lower().rfind(b"\r\n" + name + b":")
    if begin < 0:
        return b""
    begin += len(name) + 3
    return fields[begin : fields.find(b"\r\n", begin)].strip()
