"""What the worker answers to peers, below /ask/: nginx has checked who asks."""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import parse_qs

from monarchfs.peers.catalogue import Catalogue
from monarchfs.peers.copy_service import MOST_SECONDS, CopyService
from monarchfs.peers.messages import (
    Page,
    PeerError,
    decode_names_question,
    decode_spans,
    decode_wanted,
    encode_held,
    encode_listing,
    encode_names,
    encode_page,
)
from monarchfs.peers.names import NameService
from monarchfs.peers.span_sharing import SpanService
from monarchfs.system.http_server import HttpRequest, HttpResponse

BINARY = "application/octet-stream"
JSON = "application/json"


async def answer(
    catalogue: Catalogue,
    copies: CopyService,
    spans: SpanService,
    names: NameService | None,
    request: HttpRequest,
) -> HttpResponse:
    """One request. ``names``: None if this mount says nothing about names."""
    try:
        match request.method, request.path:
            case "GET", "/ask/catalogue":
                page = _page(catalogue, request.query)
            case "POST", "/ask/want":
                wanted = decode_wanted(request.body)
                await copies.copy_wanted(wanted, _seconds(request.query))
                page = catalogue.rows([one.name for one in wanted])
            case "POST", "/ask/spans":
                held = [await spans.answer(one) for one in decode_spans(request.body)]
                return HttpResponse(encode_held(held), content_type=BINARY)
            case "POST", "/ask/names" if names is not None:
                known = await names.answer(decode_names_question(request.body))
                return HttpResponse(encode_names(known), content_type=JSON)
            case "POST", "/ask/listing" if names is not None:
                listing = await names.listing(decode_names_question(request.body))
                return HttpResponse(encode_listing(listing), content_type=JSON)
            case _:
                return HttpResponse(b"There is nothing here\n", HTTPStatus.NOT_FOUND)
    except (PeerError, KeyError, ValueError) as error:
        text = f"This is no request: {error}\n"
        return HttpResponse(text.encode(), HTTPStatus.BAD_REQUEST)
    return HttpResponse(encode_page(page), content_type=BINARY)


def _page(catalogue: Catalogue, query: str) -> Page:
    values = {key: value[0] for key, value in parse_qs(query, keep_blank_values=True).items()}
    if "after" in values:
        return catalogue.page(bytes.fromhex(values["after"]))
    return catalogue.changes(int(values["incarnation"]), int(values["since"]))


def _seconds(query: str) -> float | None:
    """How long the peer waits for the files; None: a reader waits there."""
    given = parse_qs(query).get("seconds")
    return None if given is None else min(max(0.0, float(given[0])), MOST_SECONDS)
