"""Block-mode routes in vLLM's API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from vllm import envs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.renderers.chat_utils import has_non_text_content

from blockattn_rag.errors import (
    BlockAttnError,
    GrammarError,
    MissError,
    ProtocolError,
    SegmentationError,
)
from blockattn_rag.server.protocol import ENCODE, INFO, OPENAI, EncodeBody
from blockattn_rag.server.validation import parse, read_json
from blockattn_rag.server.vllm.bodies import ChatBody, CompletionBody
from blockattn_rag.server.vllm.metrics import REQUESTS
from blockattn_rag.server.vllm.service import Answer, Service


def _check_key(raw_request: Request) -> None:
    """Check the API key, because vLLM checks it only for its own routes."""
    args = getattr(raw_request.app.state, "args", None)
    keys = [key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key]
    guard = AuthenticationMiddleware(raw_request.app, keys)
    if keys and not guard.verify_token(raw_request.headers):
        raise HTTPException(401, "Unauthorized")


router = APIRouter(dependencies=[Depends(_check_key)])
_JSON = [Depends(validate_json_request)]


async def _json_body(raw_request: Request) -> Any:
    """Parse a request's body. vLLM converts a ProtocolError to status 400."""
    return await read_json(raw_request.stream(), _service(raw_request).max_tokens)


_JsonBody = Annotated[Any, Depends(_json_body)]


def _service(raw_request: Request) -> Service:
    service: Service = raw_request.app.state.blockattn
    return service


@router.get(INFO)
async def info(raw_request: Request) -> Response:
    try:
        # The first call loads the tokenizer.
        info = await asyncio.to_thread(_service(raw_request).info, raw_request.headers)
        return JSONResponse(info.to_dict())
    except BlockAttnError as error:
        return _refusal(error)


@router.post(ENCODE, dependencies=_JSON)
@with_cancellation
async def encode(fields: _JsonBody, raw_request: Request) -> Response:
    async def encoded() -> Response:
        body = await asyncio.to_thread(EncodeBody.from_dict, fields)
        answer = await _service(raw_request).encode(body, raw_request.headers)
        return JSONResponse(answer.to_dict())

    return await _counted(raw_request, encoded())


@router.get(f"{OPENAI}/models")
async def openai_models(raw_request: Request) -> Response:
    models = await raw_request.app.state.openai_serving_models.show_available_models()
    return JSONResponse(models.model_dump())


@router.post(f"{OPENAI}/chat/completions", dependencies=_JSON)
@with_cancellation
@load_aware_call
async def chat_completions(fields: _JsonBody, raw_request: Request) -> Response:
    """Like ``/v1/chat/completions``, but in block mode if the prompt contains passages."""
    response = _response(fields, _read_chat, _service(raw_request).chat, raw_request)
    return await _counted(raw_request, response)


@router.post(f"{OPENAI}/completions", dependencies=_JSON)
@with_cancellation
@load_aware_call
async def completions(fields: _JsonBody, raw_request: Request) -> Response:
    """Like ``/v1/completions``, but in block mode if the prompt contains passages."""
    response = _response(fields, _read_completion, _service(raw_request).complete, raw_request)
    return await _counted(raw_request, response)


def _read_chat(fields: Any) -> tuple[ChatBody, ChatCompletionRequest]:
    body = ChatBody.from_dict(fields)
    request: ChatCompletionRequest = _vllm_request(ChatCompletionRequest, body.fields)
    # vLLM ignores the token ids of chats with media.
    if body.not_text is None and has_non_text_content(body.fields["messages"]):
        body = replace(body, not_text="A content part has a media field, such as image_url")
    return body, request


def _read_completion(fields: Any) -> tuple[CompletionBody, CompletionRequest]:
    body = CompletionBody.from_dict(fields)
    return body, _vllm_request(CompletionRequest, body.fields)


def _vllm_request(kind: type, fields: Any) -> Any:
    try:
        return parse(kind, fields, "body")
    except (AttributeError, LookupError, TypeError) as error:
        # One of vLLM's validators raised this error.
        raise ProtocolError(f"A field of the body has the wrong type: {error}") from error


async def _response(
    fields: Any,
    read: Callable[[Any], tuple[Any, Any]],
    serve: Callable[[Any, Any, Request], Awaitable[Answer]],
    raw_request: Request,
) -> Response:
    body, request = await asyncio.to_thread(read, fields)
    answer = await serve(body, request, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if isinstance(answer, AsyncGenerator):
        args = getattr(raw_request.app.state, "args", None)
        interval = float(getattr(args, "sse_keep_alive_interval", 0))
        events = with_sse_keep_alive(answer, interval)
        return StreamingResponse(events, media_type="text/event-stream")
    return JSONResponse(answer)


async def _counted(raw_request: Request, answer: Awaitable[Response]) -> Response:
    """Await a response, and count it. An error becomes an error response."""
    try:
        response = await answer
    except BlockAttnError as error:
        response = _refusal(error)
    REQUESTS.labels(raw_request.url.path, str(response.status_code)).inc()
    return response


def _refusal(error: BlockAttnError) -> Response:
    """Build an error response in vLLM's format. Status 503: the request may succeed later."""
    statuses = {ProtocolError: 400, GrammarError: 400, SegmentationError: 400, MissError: 409}
    status = next((code for kind, code in statuses.items() if isinstance(error, kind)), 503)
    body = {"message": str(error), "type": type(error).__name__, "param": None, "code": status}
    # OpenAI's clients would otherwise retry status 409.
    headers = {"x-should-retry": "false"} if status < 500 else None
    return JSONResponse({"error": body}, status_code=status, headers=headers)
