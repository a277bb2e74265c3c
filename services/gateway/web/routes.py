"""Serves the page at / and its files, which are read once; knows nothing of what they do.

The page loads nothing from elsewhere, and its policy forbids it to. Scripts come from its
own file alone, and no text can be turned into markup: trusted types without a policy.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FILES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "licenses.txt": "text/plain; charset=utf-8",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cache-control": "no-cache",  # kept, and asked for again by its tag
    "vary": "accept-encoding",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class _File:
    """One file of the page, plain and compressed."""

    name: str
    plain: bytes
    packed: bytes
    tag: str

    def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "etag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        body = self.plain
        if "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["content-encoding"] = self.packed, "gzip"
        return Response(body, media_type=_FILES[self.name], headers=headers)


def page_routes() -> list[Route]:
    """/ and /web/FILE."""
    page = _read("index.html")
    parts = [_read(name) for name in _FILES if name != "index.html"]
    return [_route("/", page), *(_route(f"/web/{part.name}", part) for part in parts)]


def _route(path: str, file: _File) -> Route:
    async def endpoint(request: Request) -> Response:
        return file.answer(request)

    return Route(path, endpoint)


def _read(name: str) -> _File:
    plain = (resources.files(__package__) / "bundle" / name).read_bytes()
    tag = f'"{hashlib.sha256(plain).hexdigest()[:20]}"'
    return _File(name, plain, gzip.compress(plain, mtime=0), tag)
