"""/openapi.json and /docs, made when first asked for."""

from __future__ import annotations

from functools import cached_property

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from services.gateway.docs.openapi import openapi_document
from services.gateway.docs.page import docs_page


class _Documents:
    """Both forms of the document."""

    @cached_property
    def json(self) -> bytes:
        return msgspec.json.encode(openapi_document())

    @cached_property
    def html(self) -> str:
        return docs_page(openapi_document())


def docs_routes() -> list[Route]:
    """The routes of both."""
    documents = _Documents()

    async def openapi(request: Request) -> Response:
        return Response(documents.json, media_type="application/json")

    async def docs(request: Request) -> Response:
        return HTMLResponse(documents.html)

    return [Route("/openapi.json", openapi), Route("/docs", docs)]
